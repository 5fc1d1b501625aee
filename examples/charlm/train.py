"""Train a small GPT on the source of Python's standard library, character by character.

    rekindle run --nproc-per-node 4 examples/charlm/train.py --steps 300 --out results

The function `train` has all code for Rekindle: the sampler, the `with Session` that gets all state,
and the two lines `for step in session.steps` and `with step`. The rest is plain PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import Windows, load
from model import GPT, SIZES
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from rekindle.training.torch import Session, StepSampler

VALIDATION_WINDOWS = 32


@dataclass(frozen=True)
class Recipe:
    """Default values for a model of some size; the command line may override them."""

    characters: int
    batch_size: int
    lr: float


RECIPES = {
    "tiny": Recipe(characters=1_000_000, batch_size=8, lr=3e-3),
    "small": Recipe(characters=4_000_000, batch_size=16, lr=1e-3),
    "medium": Recipe(characters=10_000_000, batch_size=32, lr=6e-4),
    "large": Recipe(characters=10_000_000, batch_size=32, lr=3e-4),
}


def train(args: argparse.Namespace) -> None:
    """Train until the run has `args.steps` steps, also across interruptions of the job."""
    config, characters = SIZES[args.size], RECIPES[args.size].characters
    training, validation = (Windows(text, config.block_size) for text in load(characters))
    held_out = validation.batch(range(0, len(validation), len(validation) // VALIDATION_WINDOWS))

    torch.manual_seed(args.seed)  # the same model on every rank
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
    sampler = StepSampler(len(training), args.batch_size, seed=args.seed)

    last = None
    with Session(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, ddp=True
    ) as session:
        for step in session.steps(args.steps):  # continues after the finished steps
            with step:  # Session recovers from a fault in here, and yields the right step next
                if session.rank == 0 and step.number % args.eval_every == 0:
                    val_loss = evaluate(model, held_out, session.device)
                    step.log(val_loss=val_loss)
                    print(f"step {step.number}: validation loss {val_loss:.4f}", flush=True)

                inputs, targets = training.batch(step.indices)
                loss = session.model(inputs.to(session.device), targets.to(session.device))
                step.log(loss=loss, samples=step.indices)  # before backward, for lost ranks
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                last = loss.detach()

        if session.finished:
            report(args, session.rank, digest(model), None if last is None else last.item())


@torch.no_grad()
def evaluate(model: GPT, held_out: tuple[Tensor, Tensor], device: torch.device) -> float:
    """Return the loss on held-out text; one rank can do it, because it uses no collective."""
    inputs, targets = held_out
    model.eval()
    try:
        return model(inputs.to(device), targets.to(device)).item()
    finally:
        model.train()  # a fault may interrupt this, and the step is then repeated


def digest(model: GPT) -> str:
    """Return a hash of all parameters, which is equal only if every bit is equal."""
    hashed = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        hashed.update(parameter.detach().cpu().contiguous().numpy())
    return hashed.hexdigest()


def report(args: argparse.Namespace, rank: int, parameters: str, loss: float | None) -> None:
    """Print the result. The loss is missing if this process had no step to do."""
    print(f"rank {rank}: {args.steps} steps, loss {loss}, parameters {parameters[:16]}", flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        final = {"rank": rank, "digest": parameters, "loss": loss}
        (args.out / f"final-rank{rank}.json").write_text(json.dumps(final) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model")
    parser.add_argument("--steps", type=int, default=300, help="to train in all")
    parser.add_argument("--batch-size", type=int, help="per rank (default: by size)")
    parser.add_argument("--lr", type=float, help="at the start (default: by size)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the samples")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between validations")
    parser.add_argument("--out", type=Path, help="folder for the results of each rank")
    args = parser.parse_args()
    recipe = RECIPES[args.size]
    args.batch_size = recipe.batch_size if args.batch_size is None else args.batch_size
    args.lr = recipe.lr if args.lr is None else args.lr
    return args


if __name__ == "__main__":
    train(parse())
