"""A DDP script with epochs, a validation, a scheduler, clipping, AMP and its own checkpoints."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    dist.init_process_group(backend="gloo")  # nccl with GPUs


def data(samples):
    x = torch.randn(samples, 8)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = torch.zeros(1)
    for inputs, targets in loader:
        total += nn.functional.mse_loss(model(inputs), targets)
    dist.all_reduce(total)
    model.train()
    return total.item() / len(loader) / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("model.pt"))
    args = parser.parse_args()
    setup()
    torch.manual_seed(0)
    train_set, test_set = data(1024), data(256)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, num_workers=2)
    test_loader = DataLoader(test_set, batch_size=16, sampler=DistributedSampler(test_set))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    scaler = torch.amp.GradScaler("cpu")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (inputs, targets) in enumerate(loader):
            # A comment at the begin of the body.
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if i % 20 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} batch {i}: loss {loss.item():.6f}", flush=True)
        scheduler.step()
        score = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: score {score:.6f}", flush=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, args.out)

    if dist.get_rank() == 0:
        print("done on", os.uname().nodename)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
