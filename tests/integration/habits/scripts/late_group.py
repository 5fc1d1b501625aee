"""Train a layer from a later step on: its parameter group has a learning rate of 0 before."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
first, last = model[0].parameters(), model[2].parameters()
optimizer = torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.0}], lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            if step.number == 5:
                optimizer.param_groups[1]["lr"] = 0.001
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
