"""What the scripts of habits share: data, a network, the faults of a trial, the digest of a run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 24
SAMPLES = 256
BATCH = 4  # samples of a rank in a step
STRIKES = "HABIT_STRIKES"  # variable: [[rank, step, milliseconds], ...]
PACE_S = 0.004  # a step takes at least this time, so that a fault can hit all its parts
RANK = int(os.environ.get("RANK", "0"))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (SAMPLES x 8) and targets (SAMPLES x 1), the same in each process."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def net(*more: nn.Module) -> nn.Sequential:
    """Return a network of 8 inputs and one output, with more modules in the middle (16 wide)."""
    made = nn.Sequential(nn.Linear(8, 16), *more, nn.Tanh(), nn.Linear(16, 1))
    torch.manual_seed(2)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def strike(step: int) -> None:
    """Begin a step: this process may get SIGKILL some milliseconds from now."""
    time.sleep(PACE_S / 2)
    for number, (rank, at, delay_ms) in enumerate(json.loads(os.environ.get(STRIKES, "[]"))):
        if (rank, at) == (RANK, step) and _is_first(f"strike-{number}"):
            threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(PACE_S / 2)


def _is_first(mark: str) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def end(**kept: Any) -> None:
    """Write the digest of each object, for the comparison with another run."""
    digests = {name: _digest(thing) for name, thing in kept.items()}
    Path(f"end-{RANK}.json").write_text(json.dumps(digests))


def _digest(thing: Any) -> str:
    state = thing.state_dict() if hasattr(thing, "state_dict") else thing
    found = hashlib.sha256()
    _add(found, state)
    return found.hexdigest()[:16]


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "to_local"):
            value = value.to_local()
        found.update(str((value.dtype, tuple(value.shape))).encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            found.update(repr(key).encode())
            _add(found, each)
    elif isinstance(value, list | tuple):
        found.update(str(len(value)).encode())
        for each in value:
            _add(found, each)
    else:
        found.update(repr(value).encode())
