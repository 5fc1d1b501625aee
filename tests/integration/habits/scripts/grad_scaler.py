"""Use GradScaler; its first updates overflow and are left out."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"scaler": scaler}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(
                    session.model(inputs[step.indices]), targets[step.indices].half()
                )
            step.log(loss=loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
end(model=model, optimizer=optimizer, scaler=scaler)
