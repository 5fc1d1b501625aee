"""Use dropout and noise."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net(torch.nn.Dropout(0.2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            noisy = inputs[step.indices] + 0.1 * torch.randn(4, 8)
            loss = torch.nn.functional.mse_loss(session.model(noisy), targets[step.indices])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
