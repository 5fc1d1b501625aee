"""Update with three optimizers: two in each step, the third in every other step."""

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
second = torch.optim.SGD([model[2].weight], lr=0.01, momentum=0.9)
third = torch.optim.RMSprop([model[2].bias], lr=0.001)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(
    model=model,
    optimizer=first,
    sampler=sampler,
    ddp=True,
    extra={"second": second, "third": third},
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                session.model(inputs[step.indices]), targets[step.indices]
            )
            step.log(loss=loss)
            model.zero_grad()
            loss.backward()
            second.step()
            first.step()
            if step.number % 2:
                third.step()
end(model=model, first=first, second=second, third=third)
