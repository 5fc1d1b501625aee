"""Use BatchNorm with statistics of each rank, which no rank sends to another."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
norm = torch.nn.BatchNorm1d(16)
model = net(norm)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
ddp = {"forward_sync_buffers": False}
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=ddp) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss, mean=norm.running_mean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
