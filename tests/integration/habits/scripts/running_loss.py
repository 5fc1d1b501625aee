"""Sum up the loss of an epoch in a local variable, and keep the best epoch."""

import torch
from habits.common import end, net, samples, strike
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import DistributedDataParallel, Session, init

EPOCHS = 3


def main():
    init("gloo")
    dataset = TensorDataset(*(each[:64] for each in samples()))
    sampler = DistributedSampler(dataset, seed=5)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best, history, smooth = float("inf"), [], None
    with Session(model=model, optimizer=optimizer) as session:
        for epoch in session.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            total, seen = 0.0, 0
            for inputs, targets in session.batches(loader):
                with session.step() as step:
                    strike(step.number)
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    step.log(loss=loss, total=total, smooth=smooth, best=best, epochs=len(history))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    seen += len(inputs)
                total += loss.item() * len(inputs)
                smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
            history.append(total / seen)
            best = min(best, history[-1])
            print(f"epoch {epoch}: loss {history[-1]:.6f}")
    end(model=model.module, optimizer=optimizer, best=best, history=history, smooth=smooth)


if __name__ == "__main__":
    main()
