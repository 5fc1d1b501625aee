"""Train in an environment of each rank."""

import torch
from habits.common import RANK, STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
environment = {"position": 0.2 + 0.1 * RANK}
with Session(
    model=model,
    optimizer=optimizer,
    sampler=sampler,
    ddp=True,
    per_rank={"environment": environment},
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            x = inputs[step.indices] * environment["position"]
            loss = torch.nn.functional.mse_loss(session.model(x), targets[step.indices])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            environment["position"] *= 3.9 * (1 - environment["position"])
end(model=model, environment=environment)
