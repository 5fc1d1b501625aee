"""Use a loader that keeps its own position."""

import torch
from habits.common import RANK, STEPS, end, net, samples, strike

from rekindle.training.torch import Session

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


class Loader:
    def __init__(self):
        self.at = RANK

    def __iter__(self):
        while self.at + 8 <= len(inputs):
            self.at += 8
            yield inputs[self.at - 8 : self.at : 2], targets[self.at - 8 : self.at : 2]
        self.at = RANK

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


with Session(model=model, optimizer=optimizer, loader=Loader(), ddp=True) as session:
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
