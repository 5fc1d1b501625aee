"""Train a low-rank part beside a frozen base, whose weights only rank 0 loads."""

import torch
from habits.common import RANK, STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler


class Adapted(torch.nn.Module):
    """A frozen layer with a low-rank part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(8, 4096)
        self.down = torch.nn.Linear(8, 2, bias=False)
        self.up = torch.nn.Linear(2, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both parts."""
        return self.base(x) + self.up(self.down(x))


inputs, targets = samples()
torch.manual_seed(3)
model = torch.nn.Sequential(Adapted(), torch.nn.Linear(4096, 8), net())
if RANK == 0:
    model[0].base.load_state_dict(torch.nn.Linear(8, 4096).state_dict())  # as from a file
for parameter in (*model[0].base.parameters(), *model[1].parameters()):
    parameter.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
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
