"""Use LambdaLR."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, scheduler=scheduler
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss, rate=optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
end(model=model, optimizer=optimizer, scheduler=scheduler)
