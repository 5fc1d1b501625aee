"""Read batches by a worker of a DataLoader."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.utils.data import DataLoader, TensorDataset

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
loader = DataLoader(TensorDataset(inputs, targets), batch_sampler=sampler, num_workers=1)
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
