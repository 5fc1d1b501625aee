"""Register a communication hook."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    seen = None
    for step in session.steps(STEPS):
        if session.model is not seen:
            seen = session.model
            seen.register_comm_hook(None, allreduce_hook)
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
