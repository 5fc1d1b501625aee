"""Add a parameter group in training."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            if step.number == 5:
                optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.001})
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            model.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
