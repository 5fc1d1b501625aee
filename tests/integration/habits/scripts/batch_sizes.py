"""Take batches of different sizes."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            mine = step.indices[: 1 + step.number % 4]
            loss = torch.nn.functional.mse_loss(session.model(inputs[mine]), targets[mine])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
