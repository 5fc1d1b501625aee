"""Save own checkpoints on rank 0 between two steps."""

import torch
from habits.common import RANK, STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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
        if RANK == 0 and session.finished % 5 == 0:
            with session.phase("checkpoint"):
                torch.save({"model": model.state_dict()}, f"own-{session.finished}.pt")
end(model=model, optimizer=optimizer)
