"""Train a tensor that is in no module, in the same optimizer."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
scale = torch.ones(1, requires_grad=True)
optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"scale": scale}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            output = session.model(inputs[step.indices]) * scale
            loss = torch.nn.functional.mse_loss(output, targets[step.indices])
            step.log(loss=loss, scale=scale.detach())
            optimizer.zero_grad()
            loss.backward()
            torch.distributed.all_reduce(scale.grad)
            optimizer.step()
end(model=model, scale=scale.detach(), optimizer=optimizer)
