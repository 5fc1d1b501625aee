"""Read samples from parts of a stream."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.utils.data import DataLoader

from rekindle.training.torch import ElasticStream, Session

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def read(part, epoch, start):
    for number in range(part * 32 + start, part * 32 + 32):
        yield inputs[number], targets[number]


loader = DataLoader(ElasticStream(read, parts=8), batch_size=4)
with Session(model=model, optimizer=optimizer, loader=loader, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            x, y = step.batch
            loss = torch.nn.functional.mse_loss(session.model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, optimizer=optimizer)
