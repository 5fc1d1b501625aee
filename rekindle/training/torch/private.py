"""Hold the private names of torch that Rekindle uses, tested with torch 2.13.

`rekindle.training.torch.groups.fsdp` uses and lists FSDP's private names. A test
(`test_private.py`) fails with another version of torch that lacks one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_comm_hook as register_comm_hook
from torch._C._distributed_c10d import _resolve_process_group as group_of_name
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.batchnorm import _NormBase as NormBase

__all__ = ["NormBase", "copy_all", "group_of_name", "register_comm_hook"]

copy_all = torch._foreach_copy_  # one call for many tensors

MakeGroup = Callable[..., Any]


def reset_group_count() -> None:
    """Give the next default group the name of the first group in a new process.

    torch names a default group by its count, and the name is part of its keys in the store. A group
    whose forming broke off was counted here, but not in a new process.
    """
    c10d._world.group_count = 0


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process."""
    return list(c10d._world.pg_map)


def replace_make_group(replacement: MakeGroup) -> MakeGroup:
    """Make `dist.new_group` and device meshes call this function; return the former function."""
    before: MakeGroup = c10d._new_group_with_tag
    c10d._new_group_with_tag = replacement
    return before


def is_backend(name: str) -> bool:
    """Return whether a backend of this name is registered."""
    return name.upper() in dist.Backend._plugins


def backends_of(group: dist.ProcessGroup) -> Iterator[Any]:
    """Return the backends of a group, one for each type of device."""
    return map(group._get_backend, group._device_types)


def local_shape_and_offset(tensor: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape of this rank's piece of a DTensor, and the piece's offset in the tensor."""
    from torch.distributed.tensor import _utils

    return _utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own buffers, including those that are not saved."""
    return module._buffers
