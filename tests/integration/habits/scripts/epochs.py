"""Train in epochs, with a sampler, validation, a scheduler by epoch, and clipping."""

import torch
from habits.common import end, net, samples, strike
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import DistributedDataParallel, Session, init

EPOCHS = 3


def evaluate(model, loader):
    model.eval()
    total = torch.zeros(1)
    with torch.no_grad():
        for x, y in loader:
            total += torch.nn.functional.mse_loss(model(x), y)
    model.train()
    torch.distributed.all_reduce(total)
    return total.item()


def main():
    init("gloo")
    dataset = TensorDataset(*(each[:64] for each in samples()))
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)
    test_loader = DataLoader(dataset, batch_size=8)
    model = DistributedDataParallel(net(torch.nn.Dropout(0.1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with Session(model=model, optimizer=optimizer, scheduler=scheduler) as session:
        for epoch in session.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in session.batches(loader):
                with session.step() as step:
                    strike(step.number)
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    step.log(loss=loss, rate=scheduler.get_last_lr()[0], mode=model.training)
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
            scheduler.step()
            score = session.run(evaluate, model, test_loader)
    end(model=model.module, optimizer=optimizer, scheduler=scheduler, score=score)


if __name__ == "__main__":
    main()
