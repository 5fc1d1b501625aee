"""Skip a batch with a broken sample."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Guard, Session, StepSampler

inputs, targets = samples()
inputs[70] = float("nan")
model = net(torch.nn.BatchNorm1d(16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4, shuffle=False)
objects = {"model": model, "optimizer": optimizer, "sampler": sampler}
with Session(**objects, guard=Guard(), ddp=True) as session:
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
end(optimizer=optimizer)
