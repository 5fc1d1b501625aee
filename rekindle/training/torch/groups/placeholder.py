"""A default process group that stands for the one to come, and the script's other groups.

FSDP2 cuts a model up along a device mesh, and a mesh wants process groups when it is made. The real
ones exist from the Session on, and new ones in each generation. So the script makes mesh, model and
optimizer in a placeholder: it has a rank and a world size, and reaches nobody. What groups are made
of it is written down, and made again, in the same order, of every generation's default group.
Torch names groups by a count, so they have the same names each time; by these a mesh finds them.

Private names of torch that this relies on (2.13): _new_group_with_tag of distributed_c10d, through
which every new_group() goes; Backend._plugins; ProcessGroup._set_group_name and _set_group_desc.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed's; typed only there
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from rekindle.errors import SessionError
from rekindle.rank import environment as rank_environment

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


class _Ledger:
    """The groups that were made in the placeholder, to be made again in each generation."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._make: Callable[..., Any] = c10d._new_group_with_tag
        c10d._new_group_with_tag = self._note

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


_ledger: _Ledger | None = None


def init_placeholder_group() -> None:
    """Make the placeholder, where a script would call init_process_group() before its device mesh.

    In it init_device_mesh(), fully_shard() and optimizers are made as always; a collective raises
    torch's RuntimeError ("No backend type associated with device type ..."). The Session then makes
    all groups for real. Raises SessionError: there is a default group already.
    """
    global _ledger
    if dist.is_initialized():
        raise SessionError(
            "the default process group exists already: call init_placeholder_group() in place of "
            "init_process_group(), not after it"
        )
    _ledger = _ledger or _Ledger()
    if _BACKEND.upper() not in dist.Backend._plugins:
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
    if _ledger is not None:
        _ledger.replay(timeout_s)
