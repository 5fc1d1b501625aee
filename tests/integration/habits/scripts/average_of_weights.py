"""Average the weights of the last epochs, and compute the statistics of BatchNorm at the end."""

import torch
from habits.common import end, net, samples, strike
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import DistributedDataParallel, Session, init

EPOCHS, BEGIN = 3, 1


def main():
    init("gloo")
    dataset = TensorDataset(*(each[:64] for each in samples()))
    sampler = DistributedSampler(dataset, seed=6)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(net(torch.nn.BatchNorm1d(16)))
    average = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    late = SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)
    with Session(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra={"average": average, "late": late},
    ) as session:
        for epoch in session.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in session.batches(loader):
                with session.step() as step:
                    strike(step.number)
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    step.log(loss=loss, rate=optimizer.param_groups[0]["lr"])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            if epoch >= BEGIN:
                average.update_parameters(model.module)
                late.step()
            else:
                scheduler.step()
    update_bn(DataLoader(dataset, batch_size=8), average)
    end(model=model.module, average=average, optimizer=optimizer)


if __name__ == "__main__":
    main()
