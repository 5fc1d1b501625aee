"""Use LBFGS with a closure."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            with torch.no_grad():
                loss = torch.nn.functional.mse_loss(
                    model(inputs[step.indices]), targets[step.indices]
                )
            step.log(loss=loss)

            def closure(step=step):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(
                    model(inputs[step.indices]), targets[step.indices]
                )
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                value = loss.detach().clone()
                dist.all_reduce(value)
                return value

            optimizer.step(closure)
end(model=model, optimizer=optimizer)
