"""Keep FSDP2 models across process groups; imported only for a model with FSDP.

A DeviceMesh and a DTensor refer to their groups by name, and the names stay the same (see
rekindle.training.torch.groups.script_groups). FSDP holds some groups as objects. A step that broke
off leaves gathered parameters, incomplete reductions and gradients.

The module uses private names of torch (2.13): DeviceMesh._get_root_mesh, ._pg_registry;
FSDPModule._get_fsdp_state; FSDPState._fsdp_param_groups, ._is_root; FSDPParamGroup.mesh_info,
.post_forward_mesh_info, .fsdp_params, ._all_gather_result, ._all_gather_comm,
._reduce_scatter_comm; FSDPParam.mesh_info, ._unsharded_param, .unsharded_accumulated_grad,
.grad_offload_event.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rekindle.errors import SessionError
from rekindle.training.torch import private


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Check the optimizer. Raises SessionError: it has none of the distributed parameters."""
    changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in changed for p in model.parameters() if isinstance(p, DTensor)):
        raise SessionError(
            "the optimizer has none of the model's distributed parameters; create the optimizer "
            "after fully_shard(), because fully_shard() replaces a module's parameters"
        )


def shards_of(model: nn.Module, world_size: int) -> list[int]:
    """Return the number of the shard that each rank holds, without a process group.

    Two ranks hold the same shard if their coordinates are equal in every dimension of the mesh
    along which a parameter is not replicated. Raises SessionError: a mesh does not contain all
    ranks, or torch is too old to reset FSDP after a step that broke off.
    """
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise SessionError("a model of fully_shard() needs torch 2.13 or newer in a Session")
    coordinates: list[list[tuple[int, ...]]] = [[] for _ in range(world_size)]
    layouts = {
        (p.device_mesh, p.placements): None for p in model.parameters() if isinstance(p, DTensor)
    }
    for mesh, placements in layouts:
        ranks = mesh.mesh
        if ranks.numel() != world_size:
            raise SessionError(
                f"{mesh} has {ranks.numel()} ranks, not all {world_size}, so Rekindle does not "
                "know which ranks hold the same shard; give it with Session(shard=...)"
            )
        cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        for place in itertools.product(*map(range, ranks.shape)):
            coordinates[int(ranks[place])].append(tuple(place[dim] for dim in cut))
    numbers = {key: n for n, key in enumerate(sorted({tuple(key) for key in coordinates}))}
    return [numbers[tuple(key)] for key in coordinates]


def mesh_of(model: nn.Module) -> dict[str, int]:
    """Return the sizes of the mesh's dimensions, by name, or by number for a mesh without names."""
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    named = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return dict(zip(named, mesh.shape, strict=True))


def swap_groups(model: nn.Module) -> None:
    """Replace an earlier generation's groups in FSDP's objects by this generation's, by name."""
    for holder in {id(each): each for each in _holders(model)}.values():
        for key, value in list(holder.items()):
            if isinstance(value, dist.ProcessGroup):
                holder[key] = private.group_of_name(value.group_name)


def _holders(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Yield the dictionaries that may hold groups: swap_groups() replaces each group in them."""
    for module in model.modules():
        yield vars(module)  # SyncBatchNorm has one
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            yield parameter.device_mesh._get_root_mesh()._pg_registry
    for group in _param_groups(model):
        yield vars(group._all_gather_comm)
        yield vars(group._reduce_scatter_comm)
        infos = (group.mesh_info, group.post_forward_mesh_info)
        for info in (*infos, *(each.mesh_info for each in group.fsdp_params)):
            if info is not None:
                yield vars(info)
                yield info.mesh._get_root_mesh()._pg_registry


def reset_after_break(model: nn.Module) -> None:
    """Make FSDP ready for a first forward pass, regardless of where the last step broke off.

    The parameters are the sharded ones again, with their values; the gradients are deleted.
    """
    for group in _param_groups(model):
        group._all_gather_result = None  # reset_iter_state() would wait for it, and fail again
        for param in group.fsdp_params:
            # reset_iter_state() keeps gradients that were not reduced yet (torch 2.13). The next
            # backward pass would add to them silently.
            param.unsharded_accumulated_grad = None
            param.grad_offload_event = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
    for module in model.modules():
        # Before the first forward pass there is no root, and no state to reset.
        if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
            module.reset_iter_state()


def _param_groups(model: nn.Module) -> Iterator[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found |= {id(group): group for group in module._get_fsdp_state()._fsdp_param_groups}
    yield from found.values()
