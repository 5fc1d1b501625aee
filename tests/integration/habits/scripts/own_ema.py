"""Keep an EMA as a dictionary of tensors."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)


class Average:
    def __init__(self):
        self.values = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self):
        with torch.no_grad():
            for name, each in model.named_parameters():
                self.values[name].lerp_(each, 0.1)

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = dict(values)


ema = Average()
with Session(
    model=model, optimizer=optimizer, sampler=sampler, ddp=True, extra={"ema": ema}
) as session:
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
            ema.update()
end(model=model, ema=ema)
