"""Make process groups other than the default one: the script's, FSDP's, ZeRO's; the placeholder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed's; typed only there
from torch.distributed.distributed_c10d import GroupName
from torch.optim import Optimizer

from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.rank import environment as rank_environment
from rekindle.rank.progress import RankPlace
from rekindle.recovery.policy.plan import StateSource
from rekindle.training.torch import private

_BACKEND = "rekindle_placeholder"
_TIMEOUT_S = 600.0  # of a collective, if neither the Session nor init() has a value
# Methods of a process group that send something to other ranks. Torch calls them for its functions
# and for the constructor of its DistributedDataParallel.
_SENDING = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("alltoall", "alltoall_base", "gather", "scatter", "send", "recv", "recv_anysource"),
)
_group_log: _GroupLog | None = None
_given: GivenToInit | None = None


@dataclass(frozen=True, slots=True)
class GivenToInit:
    """The values of init() for a Session; None: it has none."""

    backend: str | None = None
    timeout_s: float | None = None


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


def _refuse(*_: Any, **__: Any) -> Any:
    raise SessionError(
        "this call sends something to other ranks before the Session, which forms their process "
        "group; move it into `with Session(...)`. If it is DistributedDataParallel(...), import it "
        "from rekindle.training.torch instead of torch.nn.parallel"
    )


for _method in _SENDING:
    setattr(_Nobody, _method, _refuse)


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


def init(  # noqa: PLR0913  the arguments of torch's function
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Stand for torch.distributed.init_process_group() in a script with a Session.

    After it, functions such as torch.distributed.get_rank() and classes such as DistributedSampler
    know the world of the job. The Session forms the real process group, and takes `backend` and
    `timeout` if it has no value of its own. After the Session the group is as before it, and
    destroy_process_group() removes it. One line names the arguments that have no effect.
    `device_id` has none either: the device is that of the model.
    Raises SessionError: a default group exists already, or the job has another rank or world size.
    A collective before the Session also raises it.
    """
    global _given
    for name, value, present in (
        ("rank", rank, rank_environment.number("RANK")),
        ("world_size", world_size, rank_environment.number("WORLD_SIZE", 1)),
    ):
        if value not in (-1, present):
            raise SessionError(
                f"init({name}={value}), but this process has {name} {present}; start the script "
                "with rekindle run --nproc-per-node N, and leave rank and world_size out"
            )
    others = {"store": store, "group_name": group_name, "pg_options": pg_options}
    unused = [name for name, value in others.items() if value]
    if init_method not in (None, "env://"):
        unused.append("init_method")
    if backend is not None and ":" in backend:  # for example cpu:gloo,cuda:nccl
        unused.append("backend")
        backend = None
    if unused and rank_environment.number("RANK") == 0:
        say(
            f"init() makes no use of {', '.join(unused)}: the Session forms the process group, "
            "with the backend of the model's device"
        )
    _make_placeholder("init()")
    _given = GivenToInit(backend, None if timeout is None else timeout.total_seconds())


def given_to_init() -> GivenToInit:
    """Return the values of init(); without init() there are none."""
    return _given or GivenToInit()


def timeout_of(asked_s: float | None) -> float:
    """Return the time limit of a collective, in seconds. asked_s: the value of the Session."""
    known = (asked_s, given_to_init().timeout_s, _TIMEOUT_S)
    return next(each for each in known if each is not None)


def init_again() -> None:
    """Make the placeholder again after a Session, if the script has called init().

    The script may then ask for its rank, and call destroy_process_group() at its end.
    """
    if _given is not None and not dist.is_initialized():
        _make_placeholder("init()")


def init_placeholder_group() -> None:
    """Make the placeholder before a device mesh, where a script would call init_process_group().

    With it a script calls init_device_mesh() and fully_shard(), and makes optimizers, as usual. The
    Session then makes the real groups. Raises SessionError: a default group exists already; later a
    collective before the Session.
    """
    _make_placeholder("init_placeholder_group()")


def _make_placeholder(name: str) -> None:
    global _group_log
    if dist.is_initialized():
        raise SessionError(
            f"the default process group exists already; call {name} instead of "
            "init_process_group(), not after it, and only once"
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
