"""Carry the hidden state of an LSTM from step to step."""

import torch
from habits.common import STEPS, end, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
torch.manual_seed(2)
model = torch.nn.LSTM(8, 8, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)


class Hidden:
    def __init__(self):
        self.value = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


hidden = Hidden()
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"hidden": hidden}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            x = inputs[:4].unsqueeze(1) * (1 + step.number / STEPS)
            out, value = session.model(x, hidden.value)
            hidden.value = tuple(each.detach() for each in value)
            loss = out.square().mean()
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, hidden=hidden)
