"""What besides the default process group belongs to one generation: the script's groups, FSDP's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed's; typed only there
from torch.optim import Optimizer

from rekindle.rank.rank_place import Place
from rekindle.recovery.policy.plan import Source
from rekindle.training.torch.groups.placeholder import leave_placeholder, make_noted_groups
from rekindle.training.torch.groups.zero import is_zero, show_loaded, show_set, swap_group


class ScriptGroups:
    """Makes the script's other groups in each generation, and has their users use them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        make: Callable[[], None] | None,
        *,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._zero = optimizer if is_zero(optimizer) else None
        self._make = make
        self.timeout_s = timeout_s
        self._fsdp = _fsdp_of(model)
        if self._fsdp is not None:
            self._fsdp.check_optimizer(model, optimizer)

    def place(self, slot: int, world_size: int, shard: int | None) -> Place:
        """Which shard of the state this rank holds, if not all ranks hold the whole.

        shard: what the script says of it.
        """
        if shard is None and self._zero is not None:
            return Place(slot, slot if world_size > 1 else None)
        if shard is not None or self._fsdp is None:
            return Place(slot, shard)
        shards = self._fsdp.shards_of(self._model, world_size)
        own = int(shards[slot]) if len(set(shards)) > 1 else None
        return Place(slot, own, mesh=self._fsdp.mesh_of(self._model))

    def form_by_hand(self, backend: str) -> None:
        """Make the default group as torchrun's environment says, and the others."""
        leave_placeholder()
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:  # one process, started as any script is
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        self.make()

    def make(self) -> None:
        """Make them, once the default group is there, and have their users use them.

        All ranks must. A model that broke off in a step is as before it.
        """
        make_noted_groups(self.timeout_s)
        if self._make is not None:
            self._make()
        if self._fsdp is not None:
            self._fsdp.swap_groups(self._model)
            self._fsdp.reset_after_break(self._model)
        if self._zero is not None:
            swap_group(self._zero)

    def step_done(self) -> None:
        """The state is about to be kept."""
        if self._zero is not None:
            show_set(self._zero)

    def loaded(self, source: Source) -> None:
        """The state was taken from there."""
        if self._zero is not None and source is not Source.FRESH:
            show_loaded(self._zero)


def _fsdp_of(model: nn.Module) -> Any:
    """Return the module that knows FSDP, if this model can be one of it."""
    if "torch.distributed.tensor" not in sys.modules:
        return None  # whoever has cut the model up has imported it
    from rekindle.training.torch.groups import fsdp

    return fsdp if fsdp.is_sharded(model) else None
