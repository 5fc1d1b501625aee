"""Train as image recipes do: mixup, an average of the model, meters, a rate for each update."""

import copy
import math

import numpy as np
import torch
from habits.common import BATCH, RANK, end, net, samples, strike
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import DistributedDataParallel, Session, init

EPOCHS, UPDATES = 3, 24


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Mixup:
    def __init__(self, alpha, off_epoch):
        self.alpha, self.off_epoch = alpha, off_epoch
        self.enabled = True

    def __call__(self, x, y):
        share = np.random.beta(self.alpha, self.alpha) if self.enabled else 1.0
        return x * share + x.flip(0) * (1 - share), y * share + y.flip(0) * (1 - share)


class ModelEma(torch.nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = self.decay * (1 - math.exp(-self.updates / 8))
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for mine, new in pairs:
            mine.copy_(mine * decay + new * (1 - decay) if mine.is_floating_point() else new)


class CosineRate:
    def __init__(self, optimizer, total):
        self.optimizer, self.total, self.base = optimizer, total, optimizer.param_groups[0]["lr"]

    def step_update(self, number):
        for group in self.optimizer.param_groups:
            group["lr"] = self.base * 0.5 * (1 + math.cos(math.pi * number / self.total))


def validate(model, ema, loader):
    sums = torch.zeros(2)
    for number, each in enumerate((model, ema.module)):
        was, _ = each.training, each.eval()
        with torch.no_grad():
            for x, y in loader:
                sums[number] += torch.nn.functional.mse_loss(each(x), y)
        each.train(was)
    torch.distributed.all_reduce(sums)
    return sums.tolist()


def train_one_epoch(session, epoch, model, loader, optimizer, rate, mixup, ema):
    losses = AverageMeter()
    mixup.enabled = epoch < mixup.off_epoch
    model.train()
    for number, (x, y) in session.batches(loader, numbered=True):
        with session.step() as step:
            strike(step.number)
            inputs, targets = mixup(x, y)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            step.log(loss=loss, rate=optimizer.param_groups[0]["lr"], avg=losses.avg)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model.module)
        losses.update(loss.item(), len(x))
        rate.step_update(epoch * len(loader) + number + 1)
    return losses.avg


def main():
    init("gloo")
    torch.manual_seed(1)
    np.random.seed(RANK)
    dataset = TensorDataset(*(each[:64] for each in samples()))
    sampler = DistributedSampler(dataset, seed=8)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    test_loader = DataLoader(dataset, batch_size=16)
    model = DistributedDataParallel(net(torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1)))
    ema = ModelEma(model.module, 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rate, mixup = CosineRate(optimizer, UPDATES), Mixup(0.8, off_epoch=2)
    best, best_epoch, results = None, None, []
    with Session(model=model, optimizer=optimizer, extra={"ema": ema}) as session:
        for epoch in session.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            loss = train_one_epoch(session, epoch, model, loader, optimizer, rate, mixup, ema)
            score, average = session.run(validate, model, ema, test_loader)
            if best is None or score < best:
                best, best_epoch = score, epoch
            results.append({"epoch": epoch, "loss": loss, "score": score, "ema": average})
    end(model=model.module, ema=ema, updates=ema.updates, results=results, best=[best, best_epoch])


if __name__ == "__main__":
    main()
