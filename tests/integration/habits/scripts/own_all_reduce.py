"""All-reduce the gradients without DDP."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(model(inputs[step.indices]), targets[step.indices])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= session.world_size
            optimizer.step()
end(model=model, optimizer=optimizer)
