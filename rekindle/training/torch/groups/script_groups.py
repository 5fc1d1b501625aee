"""Make process groups other than the default one: the script's, FSDP's, ZeRO's; the placeholder."""

from __future__ import annotations

import os
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
from rekindle.rank.progress import RankPlace
from rekindle.recovery.policy.plan import StateSource
from rekindle.training.torch import private

_BACKEND = "rekindle_placeholder"
_group_log: _GroupLog | None = None


class _Nobody(dist.ProcessGroup):
    """A group without a backend: a collective in it fails.

    With torch's own "fake" group, a collective would return immediately and leave old values in the
    tensor.
    """

    def __init__(self, rank: int, size: int) -> None:
        # Torch's subclasses use this constructor; its types have only the other one.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""

    # Torch keeps a group's name in its backend; this group has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        pass

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)


class _GroupLog:
    """The groups that a script made in the placeholder; each generation makes them again."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._make = private.replace_make_group(self._note)

    def _note(
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if not in_placeholder():
            return self._make(ranks, timeout, backend, *rest, **named)
        self._calls.append(((ranks, backend, *rest), named))
        # The options that follow are for the requested backend.
        return self._make(ranks, None, _BACKEND, None, *rest[1:], **named)

    def replay(self, timeout_s: float) -> None:
        """Make all groups again, from the current default group. All ranks must call it."""
        for (ranks, backend, *rest), named in self._calls:
            self._make(ranks, timedelta(seconds=timeout_s), backend, *rest, **named)


def init_placeholder_group() -> None:
    """Make the placeholder before a device mesh, where a script would call init_process_group().

    With it a script calls init_device_mesh() and fully_shard(), and makes optimizers, as usual. A
    collective raises torch's RuntimeError ("No backend type associated with device type ..."). The
    Session then makes the real groups. Raises SessionError: a default group exists already.
    """
    global _group_log
    if dist.is_initialized():
        raise SessionError(
            "the default process group exists already; call init_placeholder_group() instead of "
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
    """Return whether the default process group is the placeholder."""
    return dist.is_initialized() and dist.get_backend() == _BACKEND


def leave_placeholder() -> None:
    """Destroy the placeholder, so that the real default group can be made."""
    if in_placeholder():
        dist.destroy_process_group()


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is a ZeroRedundancyOptimizer, by its class's name, without an import.

    Raises SessionError: it updates within DDP's backward pass, which a Session cannot detect.
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


class ScriptGroups:
    """Makes the script's other groups in each generation, and gives them to their users.

    open: the ranks train. A group that the script makes then would exist in this generation alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        make: Callable[[], None] | None,
        *,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._zero: Any = optimizer if is_zero(optimizer) else None
        self._make = make
        self.timeout_s = timeout_s
        self.open = False
        self._fsdp = _fsdp_of(model)
        if self._fsdp is not None:
            self._fsdp.check_optimizer(model, optimizer)

    def guard(self) -> None:
        """Refuse groups that the script makes while the ranks train, with a SessionError."""

        def check(*arguments: Any, **named: Any) -> Any:
            if self.open:
                raise SessionError(
                    "the script makes a process group while the ranks train. It would end when a "
                    "rank is replaced, and only the new process would make it again. Call "
                    "dist.new_group() in the function make_groups=, which each generation calls"
                )
            return make(*arguments, **named)

        make = private.replace_make_group(check)

    def place(self, slot: int, world_size: int, shard: int | None) -> RankPlace:
        """Return the rank's place, with the shard that it holds if the ranks hold different shards.

        shard: the script's value.
        """
        if shard is None and self._zero is not None:
            return RankPlace(slot, slot if world_size > 1 else None)
        if shard is not None or self._fsdp is None:
            return RankPlace(slot, shard)
        shards = self._fsdp.shards_of(self._model, world_size)
        own = int(shards[slot]) if len(set(shards)) > 1 else None
        return RankPlace(slot, own, mesh=self._fsdp.mesh_of(self._model))

    def form_by_hand(self, backend: str) -> None:
        """Make the default group from torchrun's environment, and the other groups."""
        leave_placeholder()
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:  # one process, which the user has started without a launcher
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        self.make()

    def make(self) -> None:
        """Make the other groups after the default group, and give them to their users.

        All ranks must call it. A model that broke off in a step is reset to its state before the
        step.
        """
        self.open = False
        if _group_log is not None:  # the script has made groups in the placeholder
            _group_log.replay(self.timeout_s)
        if self._make is not None:
            self._make()
        if self._fsdp is not None:
            self._fsdp.swap_groups(self._model)
            self._fsdp.reset_after_break(self._model)
        if self._zero is not None:
            former = self._zero.process_group
            self._zero.process_group = private.group_of_name(former.group_name)

    def step_done(self) -> None:
        """Copy ZeRO's outer parameter groups to the inner optimizer, whose state is kept next.

        A scheduler may have changed the outer ones. The optimizer's own step() copies them later.
        """
        if self._zero is not None:
            outer, inner = self._zero.param_groups, self._zero.optim.param_groups
            private.copy_zero_groups(self._zero, outer, inner)

    def loaded(self, source: StateSource) -> None:
        """Copy ZeRO's loaded inner parameter groups (such as learning rates) to the outer ones."""
        if self._zero is not None and source is not StateSource.FRESH:
            outer, inner = self._zero.param_groups, self._zero.optim.param_groups
            private.copy_zero_groups(self._zero, inner, outer)


def _fsdp_of(model: nn.Module) -> Any:
    """Return the fsdp module if a parameter is distributed along a mesh; None: there is none."""
    if not any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return None
    from rekindle.training.torch.groups import fsdp

    return fsdp
