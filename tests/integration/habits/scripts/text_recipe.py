"""Fine-tune as text recipes do: micro-batches, a warm-up, counters, the best weights."""

import copy

import torch
from habits.common import end, net, samples, strike
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rekindle.training.torch import Session, init

EPOCHS, WARM_UP, TOTAL, MICRO = 3, 4, 24, 2


def rate(number):
    if number < WARM_UP:
        return number / WARM_UP
    return max(0.0, (TOTAL - number) / (TOTAL - WARM_UP))


def evaluate(model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(torch.nn.functional.mse_loss(model(x), y))
    model.train()
    total = torch.stack(losses).mean()
    torch.distributed.all_reduce(total)
    return total.item()


def main():
    init("gloo")
    dataset = TensorDataset(*(each[:64] for each in samples()))
    sampler = DistributedSampler(dataset, shuffle=True, seed=4)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    test_loader = DataLoader(dataset, batch_size=16)
    model = net(torch.nn.Dropout(0.1))
    no_decay = [p for n, p in model.named_parameters() if "bias" in n]
    decay = [p for n, p in model.named_parameters() if "bias" not in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    scheduler = LambdaLR(optimizer, rate)
    completed_steps, total_loss, tokens = 0, 0.0, 0
    best, patience, weights = float("inf"), 0, None
    with Session(model=model, optimizer=optimizer, scheduler=scheduler, ddp=True) as session:
        for epoch in session.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            total_loss = 0.0
            for x, y in session.batches(loader):
                with session.step() as step:
                    strike(step.number)
                    optimizer.zero_grad()
                    logged = 0.0
                    for inputs, targets in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
                        loss = torch.nn.functional.mse_loss(session.model(inputs), targets) / MICRO
                        loss.backward()
                        logged += loss.item()
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    step.log(loss=logged, norm=norm, done=completed_steps, tokens=tokens)
                    optimizer.step()
                    scheduler.step()
                completed_steps += 1
                total_loss += logged
                tokens += x.numel()
            score = session.run(evaluate, session.model, test_loader)
            if score < best:
                best, patience = score, 0
                weights = copy.deepcopy(model.state_dict())
            else:
                patience += 1
    model.load_state_dict(weights)
    end(model=model, scheduler=scheduler, counts=[completed_steps, tokens, total_loss, best])


if __name__ == "__main__":
    main()
