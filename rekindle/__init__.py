"""Keep distributed training runs alive.

In the training script:

    from rekindle.training.torch import Session        # PyTorch
    from rekindle.training.mindspore import Session    # MindSpore

A training run as a Prefect flow:

    from rekindle import TrainingJob, train

    train(TrainingJob(script="train.py", processes_per_node=4))

A run without Prefect, with torchrun's options: `rekindle run --nproc-per-node 4 train.py`.

`rekindle.testing` tests your script against faults. `docs/` has a page for each task.

The package imports each name at its first use, because every rank imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.blocks.job import TrainingJob
    from rekindle.checkpoints.open_store import open_store
    from rekindle.flows.train import train
    from rekindle.recovery.policy.policy import Policy
    from rekindle.tasks.hooks.rerun import recovery_hooks, retry_condition

__version__: str
__all__ = [
    "Policy",
    "TrainingJob",
    "open_store",
    "recovery_hooks",
    "retry_condition",
    "train",
]

_MODULES = {
    "Policy": "rekindle.recovery.policy.policy",
    "TrainingJob": "rekindle.blocks.job",
    "open_store": "rekindle.checkpoints.open_store",
    "recovery_hooks": "rekindle.tasks.hooks.rerun",
    "retry_condition": "rekindle.tasks.hooks.rerun",
    "train": "rekindle.flows.train",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from rekindle.names import VERSION

        return VERSION
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from rekindle.errors import extra_of

        raise extra_of(error) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
