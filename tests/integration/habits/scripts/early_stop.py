"""Stop early by a value of all ranks."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)


class Stopper:
    best, bad = float("inf"), 0

    def see(self, value):
        self.best, self.bad = (value, 0) if value < self.best else (self.best, self.bad + 1)

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


stopper = Stopper()
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"stopper": stopper}
) as session:
    for step in session.steps(STEPS):
        if stopper.bad >= STEPS:
            break
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            value = loss.detach().clone()
            dist.all_reduce(value)
            optimizer.step()
            stopper.see(value.item())
end(model=model, stopper=stopper)
