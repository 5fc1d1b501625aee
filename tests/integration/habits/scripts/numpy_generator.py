"""Draw numbers from a numpy Generator of one's own."""

import numpy as np
import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
generator = np.random.default_rng(5)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"generator": generator}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            x = inputs[step.indices] + float(generator.normal()) * 0.1
            loss = torch.nn.functional.mse_loss(session.model(x), targets[step.indices])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, state=generator.bit_generator.state)
