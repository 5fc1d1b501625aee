"""Use activation checkpointing with dropout."""

import torch
from habits.common import STEPS, end, net, samples, strike
from torch.utils.checkpoint import checkpoint

from rekindle.training.torch import Session, StepSampler


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x):
        return torch.nn.functional.dropout(self.layer(x), 0.1)


inputs, targets = samples()
model = net(Part())
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
end(model=model, optimizer=optimizer)
