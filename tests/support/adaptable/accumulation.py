"""Gradients of several batches for each update, an evaluation in the loop, and a sum of losses."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group()
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)


def evaluate(model):
    model.eval()
    return model(torch.ones(4)).item()


total_loss = 0.0
for _epoch in range(2):
    for i, x in enumerate(loader):
        loss = model(x).square().mean()
        loss.backward()
        total_loss += loss.item()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if i % 8 == 7:
            print(evaluate(model))
            model.train()
print(total_loss)
