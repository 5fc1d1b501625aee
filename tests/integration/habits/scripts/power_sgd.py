"""Compress gradients with PowerSGD, which keeps the rest of each rank."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, per_rank={"hook": state}
) as session:
    session.model.register_comm_hook(state, powerSGD_hook)
    for step in session.steps(STEPS):
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
