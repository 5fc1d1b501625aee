"""Draw random augmentations in the step, from torch, numpy and random."""

import random

import numpy as np
import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            x = (
                inputs[step.indices] * random.uniform(0.9, 1.1)
                + np.random.normal(0, 0.1)
                + torch.rand(4, 8)
            )
            loss = torch.nn.functional.mse_loss(session.model(x), targets[step.indices])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
