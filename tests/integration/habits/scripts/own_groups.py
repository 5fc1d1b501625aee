"""Use a process group of one's own."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
groups = {}
sampler = StepSampler(len(inputs), batch_size=4)


def make_groups():
    groups["all"] = dist.new_group()


with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, make_groups=make_groups
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            value = loss.detach().clone()
            dist.all_reduce(value, group=groups["all"])
            step.log(mean=value)
            optimizer.step()
end(model=model, optimizer=optimizer)
