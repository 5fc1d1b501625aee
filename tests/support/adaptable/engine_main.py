"""The loop over the epochs, whose training function is in another file."""

import torch
from torch import distributed, nn

from adaptable.engine import train_one_epoch


def main(loader, logger, loss_scaler, epochs=3):
    distributed.init_process_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        train_one_epoch(model, loader, optimizer, logger, loss_scaler)
