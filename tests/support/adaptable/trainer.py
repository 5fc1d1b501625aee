"""A class whose methods train: the update is in a method that the loop over the batches calls."""

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, model, optimizer, loader: DataLoader):
        self.model = DistributedDataParallel(model)
        self.optimizer = optimizer
        self.loader = loader
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def fit(self, epochs):
        for epoch in range(1, epochs + 1):
            self._epoch(epoch)
            self.lr_scheduler.step()
        torch.distributed.barrier()

    def _epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for inputs, targets in self.loader:
            self._batch(inputs, targets)
        print("epoch", epoch)

    def _batch(self, inputs, targets):
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()


def main(loader):
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loader).fit(3)
    torch.distributed.destroy_process_group()
