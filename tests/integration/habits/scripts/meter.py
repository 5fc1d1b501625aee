"""Sum up the loss in an object of one's own, before the backward pass."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)


class Meter:
    def __init__(self):
        self.total, self.count = 0, 0

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state):
        self.total, self.count = state["total"], state["count"]


meter = Meter()
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"meter": meter}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            meter.total += len(step.indices)
            meter.count += 1
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
end(model=model, meter=meter)
