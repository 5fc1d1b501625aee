"""Keep the lines for torchrun, with BatchNorm and two batches in a step."""

from datetime import timedelta

import torch
import torch.distributed as dist
from habits.common import BATCH, STEPS, end, net, samples, strike
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DistributedSampler, TensorDataset

from rekindle.training.torch import DistributedDataParallel as DDP
from rekindle.training.torch import Session, init

init("gloo", init_method="env://", timeout=timedelta(seconds=300))
rank, world = dist.get_rank(), dist.get_world_size()
dataset = TensorDataset(*samples())
sampler = DistributedSampler(dataset, seed=4)
each = len(dataset) // world // BATCH // 2 * 2  # steps of an epoch; a step has two batches
model = DDP(net(torch.nn.BatchNorm1d(16)), bucket_cap_mb=1)
model.register_comm_hook(None, allreduce_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(STEPS):
        with step:
            strike(step.number)
            sampler.set_epoch(2 * step.number // each)
            indices = list(sampler)[2 * step.number % each * BATCH :][: 2 * BATCH]
            inputs, targets = dataset[indices]
            optimizer.zero_grad()
            with model.no_sync():
                first = torch.nn.functional.mse_loss(model(inputs[:BATCH]), targets[:BATCH])
                first.backward()
            model.train()
            loss = torch.nn.functional.mse_loss(model(inputs[BATCH:]), targets[BATCH:])
            step.log(loss=loss, first=first, norm=model.module[0].weight.norm().item())
            loss.backward()
            optimizer.step()
            assert (dist.get_rank(), session.model) == (rank, model)
model.eval()
assert not model.module.training
assert model(samples()[0][:2]).shape == (2, 1)
assert all(name.startswith("module.") for name in model.state_dict())
end(model=model, optimizer=optimizer)
assert dist.get_rank() == rank
dist.destroy_process_group()
