"""Seed a torch.Generator with the number of the rank, and give it as if all ranks shared it."""

import torch
from habits.common import RANK, STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
generator = torch.Generator().manual_seed(5 + RANK)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"generator": generator}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            x = inputs[step.indices] + torch.randn(4, 8, generator=generator) * 0.1
            loss = torch.nn.functional.mse_loss(session.model(x), targets[step.indices])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, state=generator.get_state())
