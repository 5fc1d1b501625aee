"""Use SGD with momentum, and a learning rate for each layer."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
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
