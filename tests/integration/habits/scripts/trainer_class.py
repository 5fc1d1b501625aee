"""Keep meters, lists, arrays and counters in a class, in a closure, and in a module's variables."""

from collections import Counter, defaultdict, deque

import numpy as np
import torch
from habits.common import end, net, samples, strike
from torch.utils.data import DataLoader, TensorDataset

from rekindle.training.torch import Session

EPOCHS = 3
losses = []
seen = 0


class Meter:
    """An average, as many scripts have it."""

    def __init__(self):
        self.recent = deque(maxlen=3)
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.recent.append(value)
        self.total += value
        self.count += 1


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


class Trainer:
    updates = 0

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.meters = defaultdict(Meter)
        self.bins = np.zeros(8, dtype=np.int64)
        self.average = torch.zeros(2)
        self.worst = np.float64(0.0)
        self.kinds = Counter()
        self.pairs = []
        self.count = counter()

    def train(self, session, inputs, targets):
        global seen
        with session.step() as step:
            strike(step.number)
            loss = torch.nn.functional.mse_loss(session.model(inputs), targets)
            step.log(loss=loss, **self.values())
            seen += len(inputs)
            losses.append(loss.item())
            self.meters["loss"].update(loss.item())
            self.bins[step.number % 8] += 1
            self.average += loss.detach()
            self.worst = max(self.worst, np.float64(loss.item()))
            self.kinds["large" if loss > 0.5 else "small"] += 1
            self.pairs.append([step.number, [loss.item()]])
            self.count()
            Trainer.updates += 1
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.meters["after"].update(loss.item())

    def values(self):
        meters = {name: [m.total, m.count, *m.recent] for name, m in self.meters.items()}
        arrays = [*self.bins.tolist(), *self.average.tolist(), self.worst.item()]
        calls = self.count.__closure__[0].cell_contents
        counts = [seen, len(losses), Trainer.updates, calls, *self.kinds.values()]
        return {"meters": str(meters), "arrays": arrays, "counts": counts, "pairs": str(self.pairs)}


def main():
    torch.manual_seed(7)
    dataset = TensorDataset(*(each[:32] for each in samples()))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    model = net(torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer)
    with Session(model=model, optimizer=optimizer, ddp=True) as session:
        for _ in session.epochs(EPOCHS):
            for inputs, targets in session.batches(loader):
                trainer.train(session, inputs, targets)
    end(model=model, optimizer=optimizer, values=trainer.values(), losses=losses)


if __name__ == "__main__":
    main()
