"""Give the ranks different numbers of batches, with join()."""

import torch
from habits.common import RANK, STEPS, end, net, samples

from rekindle.training.torch import Session

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    steps = session.steps(STEPS)
    with session.model.join():
        for begin, step in zip(range(0, 64 + 32 * RANK, 4), steps, strict=False):
            with step:
                batch = slice(begin, begin + 4)
                loss = torch.nn.functional.mse_loss(session.model(inputs[batch]), targets[batch])
                step.log(loss=loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
end(model=model, optimizer=optimizer)
