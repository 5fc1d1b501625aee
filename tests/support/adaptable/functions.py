"""A script that spawns its ranks, trains in a function of its own, and resumes on its own."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from tqdm import tqdm

best_score = 0.0


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("--resume", type=Path)
    return parser.parse_args()


def main():
    mp.spawn(main_worker, nprocs=2, args=(parse(),))


def main_worker(gpu, args):
    global best_score
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", world_size=2, rank=gpu)
    dataset = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = StepLR(optimizer, step_size=1)
    ema = None
    if args.epochs > 2:
        ema = torch.optim.swa_utils.AveragedModel(model.module)
    if args.resume:
        checkpoint = torch.load(args.resume)
        args.start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    for epoch in range(args.start_epoch, args.epochs):
        train(loader, model, criterion, optimizer, ema, epoch)
        score = validate(loader, model)
        scheduler.step()
        dist.barrier()
        best_score = max(score, best_score)
        if gpu == 0:
            torch.save({"model": model.state_dict(), "epoch": epoch + 1}, "last.pt")


def train(loader, model, criterion, optimizer, ema, epoch):
    losses = []
    bar = tqdm(enumerate(loader, 1), total=len(loader))
    for i, (inputs, target) in bar:
        if target.isnan().any():
            continue
        loss = criterion(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ema is not None:
            ema.update_parameters(model)
        losses.append(loss.item())
        bar.set_description(f"epoch {epoch} batch {i}")
    print(sum(losses) / len(losses))


def validate(loader, model):
    model.eval()
    with torch.no_grad():
        return sum(model(x).sum().item() for x, _ in loader)


if __name__ == "__main__":
    main()
