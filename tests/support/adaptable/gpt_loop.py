"""A script with an endless loop over steps, batches from memory, and a schedule by hand."""

import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters = 200
accumulation = 2
eval_interval = 50
grad_clip = 1.0
ddp = "RANK" in os.environ

if ddp:
    init_process_group(backend="gloo")
    master_process = int(os.environ["RANK"]) == 0
else:
    master_process = True

torch.manual_seed(1)
tokens = torch.randint(0, 64, (4096,))
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=False)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


def get_batch():
    starts = torch.randint(len(tokens) - 17, (8,))
    rows = torch.stack([tokens[i : i + 17] for i in starts])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    x, y = get_batch()
    loss = nn.functional.cross_entropy(raw_model(x).flatten(0, 1), y.flatten())
    raw_model.train()
    return loss.item()


iter_num = 0
while True:
    # set the learning rate for this iteration
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 - iter_num / (max_iters + 1))

    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: loss {estimate_loss():.4f}", flush=True)

    for _ in range(accumulation):
        x, y = get_batch()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss / accumulation).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

    # the end of the training
    if iter_num > max_iters:
        break

if ddp:
    destroy_process_group()
