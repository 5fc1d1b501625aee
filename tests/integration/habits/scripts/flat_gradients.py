"""Let the gradients be views of one buffer."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)

flat = torch.zeros(sum(p.numel() for p in model.parameters()))
with Session(model=model, optimizer=optimizer, sampler=sampler) as session:
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            flat.zero_()
            loss = torch.nn.functional.mse_loss(model(inputs[step.indices]), targets[step.indices])
            step.log(loss=loss)
            loss.backward()
            dist.all_reduce(flat)
            optimizer.step()
end(model=model, optimizer=optimizer)
