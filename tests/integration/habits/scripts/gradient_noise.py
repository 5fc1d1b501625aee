"""Add noise of an own generator to the gradients, with a deviation that falls by the step."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
noise = torch.Generator().manual_seed(7)  # the same on all ranks
norms = torch.zeros(4)  # the last norms, for the limit of the next one
sampler = StepSampler(len(inputs), batch_size=4)
with Session(
    model=model,
    optimizer=optimizer,
    sampler=sampler,
    ddp=True,
    extra={"noise": noise, "norms": norms},
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss, norms=norms)
            optimizer.zero_grad()
            loss.backward()
            deviation = 0.1 / (1 + step.number) ** 0.55
            for parameter in model.parameters():
                parameter.grad += deviation * torch.randn(parameter.shape, generator=noise)
            limit = max(0.5, norms.mean().item())
            norms[step.number % 4] = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
end(model=model, optimizer=optimizer, noise=noise.get_state(), norms=norms)
