"""Process groups besides the default one: the script's, FSDP's, ZeRO's; the placeholder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed's; typed only there
from torch.distributed.distributed_c10d import GroupName
from torch.optim import Optimizer

from rekindle.errors import SessionError
from rekindle.rank import environment as rank_environment
from rekindle.rank.held_state import RankPlace
from rekindle.recovery.policy.plan import StateSource
from rekindle.training.torch import private

_BACKEND = "rekindle_placeholder"


class _Nobody(dist.ProcessGroup):
    """A group without a backend: a collective of it fails, where torch's own "fake" one would
    return at once and leave in the tensor whatever was there.
    """

    def __init__(self, rank: int, size: int) -> None:
        # The one constructor of which torch makes subclasses; its types know the other alone.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""

    # Torch keeps a group's name in its backend; this one has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        pass

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)


class _GroupLog:
    """The groups that were made in the placeholder, to be made again in each generation."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._make = private.replace_make_group(self._note)

    def _note(
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if not in_placeholder():
            return self._make(ranks, timeout, backend, *rest, **named)
        self._calls.append(((ranks, backend, *rest), named))
        # The options behind it are those of the backend that was asked for.
        return self._make(ranks, None, _BACKEND, None, *rest[1:], **named)

    def replay(self, timeout_s: float) -> None:
        """Make all groups again, of the default group that there is now. All ranks must."""
        for (ranks, backend, *rest), named in self._calls:
            self._make(ranks, timedelta(seconds=timeout_s), backend, *rest, **named)


_group_log: _GroupLog | None = None


def init_placeholder_group() -> None:
    """Make the placeholder, where a script would call init_process_group() before its device mesh.

    In it init_device_mesh(), fully_shard() and optimizers are made as always; a collective raises
    torch's RuntimeError ("No backend type associated with device type ..."). The Session then makes
    all groups for real. Raises SessionError: there is a default group already.
    """
    global _group_log
    if dist.is_initialized():
        raise SessionError(
            "the default process group exists already: call init_placeholder_group() in place of "
            "init_process_group(), not after it"
        )
    _group_log = _group_log or _GroupLog()
    if not private.is_backend(_BACKEND):
        make = lambda _store, rank, size, _timeout: _Nobody(rank, size)  # noqa: E731
        dist.Backend.register_backend(_BACKEND, make, devices=["cpu", "cuda"])
    dist.init_process_group(
        _BACKEND,
        rank=rank_environment.number("RANK"),
        world_size=rank_environment.number("WORLD_SIZE", 1),
        store=HashStore(),
    )


def in_placeholder() -> bool:
    """Whether the default process group is the placeholder."""
    return dist.is_initialized() and dist.get_backend() == _BACKEND


def leave_placeholder() -> None:
    """Make room for the real default group."""
    if in_placeholder():
        dist.destroy_process_group()


def make_noted_groups(timeout_s: float) -> None:
    """Make the groups that were made in the placeholder; none, if there was none."""
    if _group_log is not None:
        _group_log.replay(timeout_s)


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
    optimizer.process_group = private.group_of_name(optimizer.process_group.group_name)


def show_set(optimizer: Any) -> None:
    """Have the inside know the parameter groups as they were set outside, by a scheduler say.

    Its own step() does so too, but a state that is kept before it would have the old ones.
    """
    optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)


def show_loaded(optimizer: Any) -> None:
    """Have its own parameter groups (the learning rate, say) be what the inside has loaded."""
    optimizer._sync_param_groups(optimizer.optim.param_groups, optimizer.param_groups)


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

    def place(self, slot: int, world_size: int, shard: int | None) -> RankPlace:
        """Which shard of the state this rank holds, if not all ranks hold the whole.

        shard: what the script says of it.
        """
        if shard is None and self._zero is not None:
            return RankPlace(slot, slot if world_size > 1 else None)
        if shard is not None or self._fsdp is None:
            return RankPlace(slot, shard)
        shards = self._fsdp.shards_of(self._model, world_size)
        own = int(shards[slot]) if len(set(shards)) > 1 else None
        return RankPlace(slot, own, mesh=self._fsdp.mesh_of(self._model))

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

    def loaded(self, source: StateSource) -> None:
        """The state was taken from there."""
        if self._zero is not None and source is not StateSource.FRESH:
            show_loaded(self._zero)


def _fsdp_of(model: nn.Module) -> Any:
    """Return the module that knows FSDP, if this model can be one of it."""
    if "torch.distributed.tensor" not in sys.modules:
        return None  # whoever has cut the model up has imported it
    from rekindle.training.torch.groups import fsdp

    return fsdp if fsdp.is_sharded(model) else None
