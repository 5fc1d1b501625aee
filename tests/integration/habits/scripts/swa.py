"""Use SWA with its scheduler."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.optim.swa_utils import SWALR, AveragedModel

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
average = AveragedModel(model)
scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)
with Session(
    model=model,
    optimizer=optimizer,
    sampler=sampler,
    ddp=True,
    scheduler=scheduler,
    extra={"average": average},
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
            optimizer.step()
            if step.number >= 10:
                average.update_parameters(model)
                scheduler.step()
end(model=model, average=average, scheduler=scheduler)
