"""Train in epochs with shuffle=True, a GradScaler, a scheduler by batch, and a meter."""

import torch
from habits.common import end, net, samples, strike
from torch.utils.data import DataLoader, TensorDataset

from rekindle.training.torch import Session

EPOCHS = 3


class Meter:
    """An average over all ranks."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        torch.distributed.all_reduce(value)
        self.total += value.item()
        self.count += 1

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


torch.manual_seed(7)
loader = DataLoader(TensorDataset(*(each[:32] for each in samples())), batch_size=4, shuffle=True)
model = net(torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=24)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
meter = Meter()
extra = {"scaler": scaler, "meter": meter}


def train(inputs, targets, session):
    """Train one batch in a function of its own."""
    with session.step() as step:
        strike(step.number)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(session.model(inputs), targets)
        step.log(loss=loss, rate=scheduler.get_last_lr()[0], mean=meter.total)
        meter.update(loss.detach().clone())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


with Session(
    model=model, optimizer=optimizer, scheduler=scheduler, ddp=True, extra=extra
) as session:
    for _ in session.epochs(EPOCHS):
        for inputs, targets in session.batches(loader):
            train(inputs, targets, session)
            scheduler.step()
end(model=model, optimizer=optimizer, scheduler=scheduler, meter=meter)
