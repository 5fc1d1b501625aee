"""Forget the `with step:` block."""

import torch
from habits.common import STEPS, end, net, samples

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        loss = torch.nn.functional.mse_loss(
            session.model(inputs[step.indices]), targets[step.indices]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
end(model=model, optimizer=optimizer)
