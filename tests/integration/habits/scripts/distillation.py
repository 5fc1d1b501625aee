"""Distil a frozen teacher into a student, with a layer of the loss that trains as well."""

import copy

import torch
from habits.common import STEPS, end, net, samples, strike

from rekindle.training.torch import Session, StepSampler


class Distiller(torch.nn.Module):
    """Student and projection, and a teacher that hooks observe."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.project = student, torch.nn.Linear(16, 16)
        torch.nn.init.eye_(self.project.weight)
        torch.nn.init.zeros_(self.project.bias)
        self.teacher = teacher.requires_grad_(False).eval()
        self.seen = {}
        for name, module in (("student", student), ("teacher", teacher)):
            module[0].register_forward_hook(self.keeper(name))

    def keeper(self, name):
        def keep(module, given, output):
            self.seen[name] = output

        return keep

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x, y):
        output, soft = self.student(x), self.teacher(x)
        hint = (self.project(self.seen["student"]) - self.seen["teacher"]).square().mean()
        loss = torch.nn.functional.mse_loss(output, y)
        return 0.5 * loss + 0.3 * (output - soft).square().mean() + 0.2 * hint


inputs, targets = samples()
teacher = net(torch.nn.Dropout(0.5))
student = copy.deepcopy(teacher)
with torch.no_grad():
    student[0].weight.mul_(0.5)
model = Distiller(student, teacher)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 5),
    ],
    milestones=[5],
)
sampler = StepSampler(len(inputs), batch_size=4)
with Session(
    model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, ddp=True
) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            loss = session.model(inputs[step.indices], targets[step.indices])
            step.log(loss=loss, rate=scheduler.get_last_lr()[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
end(model=model, optimizer=optimizer, scheduler=scheduler)
