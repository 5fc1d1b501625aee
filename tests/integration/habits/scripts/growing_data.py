"""Change the data set, the batch size and the loss from epoch to epoch."""

import torch
from habits.common import RANK, end, net, samples, strike
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from rekindle.training.torch import Session, init

STAGES = ((32, 2, 0.0), (32, 4, 0.1), (96, 4, 0.2))  # samples, batch size, noise: 8, 4, 12 steps


def loader_of(dataset, stage):
    size, batch, _ = STAGES[stage]
    easy = sorted(range(len(dataset)), key=lambda n: dataset[n][1].abs().item())[:size]
    part = Subset(dataset, easy)
    sampler = DistributedSampler(part, seed=stage, drop_last=True)
    return DataLoader(part, batch_size=batch, sampler=sampler, num_workers=stage % 2)


def main():
    init("gloo")
    torch.manual_seed(RANK)
    dataset = TensorDataset(*samples())
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
    difficulty, seen = [], 0
    with Session(model=model, optimizer=optimizer, ddp=True) as session:
        for stage in session.epochs(len(STAGES)):
            loader, noise = loader_of(dataset, stage), STAGES[stage][2]
            loader.sampler.set_epoch(stage)
            difficulty.append(noise)
            for x, y in session.batches(loader):
                with session.step() as step:
                    strike(step.number)
                    goal = y + noise * torch.randn_like(y)
                    loss = torch.nn.functional.mse_loss(session.model(x), goal)
                    step.log(loss=loss, seen=seen, difficulty=sum(difficulty))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                seen += len(x)
    end(model=model, optimizer=optimizer, seen=seen, difficulty=difficulty)


if __name__ == "__main__":
    main()
