"""Loop over the parts of a step."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, keep_global_batch=True
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            optimizer.zero_grad()
            for part in step.parts():
                loss = torch.nn.functional.mse_loss(
                    session.model(inputs[part.indices]), targets[part.indices]
                )
                (loss * part.weight).backward()
            step.log(loss=loss)
            optimizer.step()
end(model=model, optimizer=optimizer)
