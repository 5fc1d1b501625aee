"""Lower a temperature that is a plain attribute of the model, in its forward pass."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = net()
        self.temperature = 1.0
        self.output = None

    def forward(self, x):
        self.output = self.layers(x)
        self.temperature *= 0.95
        return self.output / self.temperature


inputs, targets = samples()
model = Network()
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
end(model=model)
