"""Train two networks in turn, one update in each step."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = net()
critic = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
other = torch.optim.AdamW(critic.parameters(), lr=0.01)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(
    model=model, optimizer=optimizer, sampler=sampler, extra={"critic": critic, "other": other}
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            optimizer.zero_grad()
            other.zero_grad()
            batch = inputs[step.indices]
            trained, update = (model, optimizer) if step.number % 2 else (critic, other)
            loss = (model(batch) - critic(batch) * 0.5).square().mean()
            step.log(loss=loss)
            loss.backward()
            for parameter in trained.parameters():
                dist.all_reduce(parameter.grad)
            update.step()
end(model=model, critic=critic, optimizer=optimizer, other=other)
