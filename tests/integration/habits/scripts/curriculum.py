"""Change the loss by the number of the step."""

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
            weight = 1.0 if step.number < STEPS // 2 else 0.5
            loss = (
                weight * (session.model(inputs[step.indices]) - targets[step.indices]).abs().mean()
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
