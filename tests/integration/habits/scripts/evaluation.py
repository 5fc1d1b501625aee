"""Evaluate in eval mode every few steps, inside the step."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net(torch.nn.Dropout(0.2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            if step.number % 4 == 3:
                with session.phase("evaluate"), torch.no_grad():
                    model.eval()
                    strike(step.number)
                    score = torch.nn.functional.mse_loss(model(inputs), targets)
                    dist.all_reduce(score)
                    step.log(score=score)
                model.train()
            else:
                strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
