"""ZeroRedundancyOptimizer: every rank has the whole model, and a piece of the optimizer's state.

Its own state_dict() wants all pieces on one rank first; a rank's piece is the state of the
optimizer inside. Private name of torch that this relies on (2.13): _sync_param_groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group  # as typed

from rekindle.errors import SessionError


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one; told by name, for nobody else need import it.

    Raises SessionError: one that makes its update within DDP's backward pass, unseen.
    """
    if all(kind.__name__ != "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        return False
    if vars(optimizer)["_overlap_with_ddp"]:
        raise SessionError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) changes parameters in the backward "
            "pass, where a Session cannot see it; leave overlap_with_ddp out"
        )
    return True


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose state this rank holds."""
    inner: Any = vars(optimizer)["optim"] if is_zero(optimizer) else optimizer
    assert isinstance(inner, torch.optim.Optimizer)
    return inner


def swap_group(optimizer: Any) -> None:
    """Put this generation's group where it holds that of an earlier one, by its name."""
    optimizer.process_group = _resolve_process_group(optimizer.process_group.group_name)


def show_set(optimizer: Any) -> None:
    """Have the inside know the parameter groups as they were set outside, by a scheduler say.

    Its own step() does so too, but a state that is kept before it would have the old ones.
    """
    optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)


def show_loaded(optimizer: Any) -> None:
    """Have its own parameter groups (the learning rate, say) be what the inside has loaded."""
    optimizer._sync_param_groups(optimizer.optim.param_groups, optimizer.param_groups)
