"""Accumulate the gradients of several micro-batches inside one step."""

import contextlib

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=8)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            optimizer.zero_grad()
            parts = torch.tensor(step.indices).split(2)
            total = 0.0
            for number, part in enumerate(parts, start=1):
                with contextlib.nullcontext() if number == len(parts) else session.model.no_sync():
                    loss = torch.nn.functional.mse_loss(session.model(inputs[part]), targets[part])
                    (loss / len(parts)).backward()
                total += loss.item()
            step.log(loss=total)
            optimizer.step()
end(model=model, optimizer=optimizer)
