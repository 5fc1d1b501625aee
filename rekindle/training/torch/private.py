"""Hold the private names of torch that Rekindle uses, tested with torch 2.13.

`rekindle.training.torch.groups.fsdp` uses and lists FSDP's private names, and
`rekindle.training.torch.groups.ddp` overrides two private methods of DDP. A test
(`test_private.py`) fails with another version of torch that lacks one of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroup, ProcessGroupGloo
from torch._C._distributed_c10d import _register_comm_hook as register_comm_hook
from torch._C._distributed_c10d import _resolve_process_group as group_of_name
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.parallel import DistributedDataParallel

__all__ = ["NormBase", "copy_all", "group_of_name", "register_comm_hook"]

# Attributes of torch.amp.GradScaler that are its state. Tensors are None until their first use.
_SCALE = frozenset(
    f"_{name}"
    for name in (
        *("scale", "growth_tracker", "init_scale", "init_growth_tracker"),
        *("growth_factor", "backoff_factor", "growth_interval"),
    )
)

# Packages whose loaders give the same order as DataLoader.
_LOADERS = ("torch", "torchdata")

copy_all = torch._foreach_copy_  # one call for many tensors
largest_of = functools.partial(torch._foreach_norm, ord=float("inf"))  # of each tensor
quantized = torch._make_per_tensor_quantized_tensor
quantized_by_channel = torch._make_per_channel_quantized_tensor

MakeGroup = Callable[..., Any]


def before_fork() -> None:
    """Empty the caches that `init_process_group` empties in each rank.

    The import of torch._dynamo fills them. They take 2 ms of each rank, because the rank shares
    their memory with the fork server until it touches them.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.trace_rules.clear_lru_cache()


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a sparse tensor, which may have an index several times."""
    return [tensor._indices(), tensor._values()]


def batches_given(iterator: Any) -> int | None:
    """Return how many batches the iterator of a DataLoader has given; None: it is another one."""
    return getattr(iterator, "_num_yielded", None)


def index_sampler_of(iterator: Any) -> Any:
    """Return the sampler that gives the indices to the iterator of a DataLoader, or None."""
    return getattr(iterator, "_index_sampler", None)


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


def default_store() -> Any:
    """Return the store of the default process group, with the group's own prefix."""
    return c10d._get_default_store()


def attributes_of(thing: Any) -> list[str]:
    """Return the names of an object's attributes, also of those in slots."""
    slots = [each for kind in type(thing).__mro__ for each in vars(kind).get("__slots__", ())]
    return [*slots, *getattr(thing, "__dict__", ())]


def is_power_sgd(thing: Any) -> bool:
    """Return whether it is the state of torch's hook PowerSGD, without an import."""
    return any(kind.__name__ == "PowerSGDState" for kind in type(thing).__mro__)


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


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the module's own parameters."""
    return module._parameters


def scale_of(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return a scaler's values, with the live tensors; a scaler that is off has none."""
    return {name: value for name, value in vars(scaler).items() if name in _SCALE}


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Forget which optimizers' gradients are unscaled, and whether they are finite."""
    scaler.__dict__.get("_per_optimizer_states", {}).clear()


def iterates_like_torch(loader: Any) -> bool:
    """Return whether the class of a loader leaves its iterators to DataLoader or to torchdata."""
    made = [getattr(type(loader), name, None) for name in ("__iter__", "_get_iterator")]
    return all(getattr(each, "__module__", "").partition(".")[0] in _LOADERS for each in made)


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile() has wrapped, or the module itself.

    The names in the wrapper's state begin with `_orig_mod.`.
    """
    inner = vars(module)["_modules"].get("_orig_mod")
    return module if inner is None else inner


def uncompiled_name(name: str) -> str:
    """Return a name in a module's state without those of the wrappers of torch.compile()."""
    return name.replace("_orig_mod.", "")


def has_extra_state(module: torch.nn.Module) -> bool:
    """Return whether a module adds values of its own to its state."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def is_initialised(module: torch.nn.Module) -> bool:
    """Return whether nn.Module.__init__ has run for this module."""
    return "_modules" in module.__dict__


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that only tensors with the same storage share; storages may be empty."""
    number: int = tensor.untyped_storage()._cdata
    return number


def version_of(tensor: torch.Tensor) -> int:
    """Return how often operations have changed the tensor in place."""
    return tensor._version


def copy_zero_groups(zero: Any, source: list[Any], target: list[Any]) -> None:
    """Copy parameter groups, except their parameters, within a ZeroRedundancyOptimizer."""
    zero._sync_param_groups(source, target)


def uses_python_reducer(wrapper: DistributedDataParallel) -> bool:
    """Return whether torch._dynamo replaces the reducer of a DDP wrapper."""
    return wrapper._use_python_reducer


def comm_hooks_of(wrapper: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the wrapper's own list of communication hooks, each with its state."""
    return wrapper._comm_hooks


def take_comm_hooks(wrapper: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Remove the list of hooks from a wrapper and return it; it is empty before __init__."""
    hooks: list[tuple[Any, Any]] = wrapper.__dict__.pop("_comm_hooks", [])
    return hooks


def check_comm_hook(wrapper: DistributedDataParallel, hook: Callable[..., Any]) -> None:
    """Raise DDP's own error if DDP cannot call this hook."""
    DistributedDataParallel._check_comm_hook(wrapper, hook)


def broadcast_buffers(
    wrapper: DistributedDataParallel, buffers: list[torch.Tensor], size: int, source: int
) -> None:
    """Send buffers from rank `source` in DDP's own way, in messages of `size` bytes."""
    DistributedDataParallel._distributed_broadcast_coalesced(wrapper, buffers, size, source)


def ignored_by_ddp(module: torch.nn.Module) -> set[str]:
    """Return the names of the parameters and buffers that the script excludes from DDP."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def parameters_for_reducer(
    wrapper: DistributedDataParallel,
) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """Return DDP's parameters in its own order, and whether each has sparse gradients."""
    found: tuple[list[torch.nn.Parameter], list[bool]]
    found = DistributedDataParallel._build_params_for_reducer(wrapper)
    return found


def rebuild_buckets(wrapper: DistributedDataParallel) -> bool:
    """Lay out the buckets in the order of all parameters now, and send no message.

    Return whether the reducer did it. Raises AttributeError: the reducer has no such method; torch
    has it since 2.3.
    """
    reducer = wrapper.reducer
    reducer._push_all_rebuilt_params()
    reducer._update_process_group(_solo_group(wrapper.device_type))
    rebuilt = reducer._rebuild_buckets()
    reducer._update_process_group(wrapper.process_group)
    return rebuilt


@functools.cache
def _solo_group(device_type: str) -> ProcessGroup:
    """Return a group of this process alone: the broadcast of a layout then has no receiver."""
    store = HashStore()
    group = ProcessGroup(store, 0, 1)
    gloo = ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device(device_type), ProcessGroup.BackendType.GLOO, gloo)
    return group
