"""Change the temperature of the loss in a variable, and take batches with next()."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.utils.data import DataLoader, TensorDataset

from rekindle.training.torch import Session

loader = DataLoader(TensorDataset(*samples()), batch_size=4, shuffle=True)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
temperature, batches = 1.0, iter(loader)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            inputs, targets = next(batches)
            loss = torch.nn.functional.mse_loss(session.model(inputs) / temperature, targets)
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            temperature *= 0.95
end(model=model, optimizer=optimizer)
