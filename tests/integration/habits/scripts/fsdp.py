"""Use FSDP2: each rank has a shard of the state."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.distributed.fsdp import fully_shard

from rekindle.training.torch import Session, StepSampler, init_placeholder_group

init_placeholder_group()
inputs, targets = samples()
model = net()
fully_shard(model)
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
            optimizer.step()
end(model=model, optimizer=optimizer)
