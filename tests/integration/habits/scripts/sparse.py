"""Use an embedding with sparse gradients."""

import torch
import torch.distributed as dist
from habits.common import STEPS, end, samples, strike

from rekindle.training.torch import Session, StepSampler

inputs, targets = samples()
model = torch.nn.Sequential(torch.nn.Embedding(64, 8, sparse=True), torch.nn.Linear(8, 1))
torch.manual_seed(3)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(model=model, optimizer=optimizer, sampler=sampler) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(
                model(torch.tensor(step.indices) % 64), targets[step.indices]
            )
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                dist.all_reduce(parameter.grad)
            optimizer.step()
end(model=model, optimizer=optimizer)
