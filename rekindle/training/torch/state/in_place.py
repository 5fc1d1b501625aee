"""Load a state into live objects, so that their containers and tensors stay the same objects.

A script may hold them: a parameter group, a scheduler's list of learning rates, an average.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from rekindle.errors import SessionError
from rekindle.training.torch.private import uncompiled_name
from rekindle.training.torch.state.skeleton import LocalShard


class Stateful(Protocol):
    """An object with a state: a module, an optimizer, a scheduler, a sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def state_of(thing: Stateful) -> Any:
    """Return the state of an object. A compiled part of a module has the names of the part itself.

    Raises SessionError: two values of a module have the same name then.
    """
    state = thing.state_dict()
    if not isinstance(thing, nn.Module) or all(each == uncompiled_name(each) for each in state):
        return state
    found = type(state)((uncompiled_name(name), value) for name, value in state.items())
    if len(found) < len(state):
        raise SessionError("two parts of a module have the same name without `_orig_mod`")
    return found


def load_in_place(thing: Stateful, state: Any) -> None:
    """Load a state. Containers and tensors of the object stay the same objects.

    A script may hold them: a scheduler's list of learning rates, a list of averages. Many
    load_state_dict() put new ones in their place.
    """
    if isinstance(thing, nn.Module):  # it fills its tensors in place
        thing.load_state_dict(state)
        return
    held = list(_held(thing, set()))
    live = thing.state_dict()
    given, before = _ids(state), _ids(live)
    thing.load_state_dict(state)
    loaded = thing.state_dict()
    after = _ids(loaded)
    filled: dict[int, Any] = {}
    for attributes, key, old in held:
        new = attributes.get(key)
        # An attribute that selects one of several objects is not among these.
        if new is not old and (id(new) in given or (id(old) in before and id(new) in after)):
            attributes[key] = adopt(old, new, filled)


def adopt(old: Any, new: Any, filled: dict[int, Any]) -> Any:
    """Return `old`, filled with the contents of `new`; where this is not possible, return `new`.

    filled: what was filled before, by identity. Two places may have shared an object, but have
    different ones in the state.
    """
    if old is new or type(old) is not type(new) or filled.get(id(old), new) is not new:
        return new
    if isinstance(old, list | dict):
        filled[id(old)] = new
    if isinstance(old, list):
        pairs = list(itertools.zip_longest(old, new))[: len(new)]
        old[:] = [adopt(a, b, filled) for a, b in pairs]
    elif isinstance(old, dict):
        items = {key: adopt(old.get(key), value, filled) for key, value in new.items()}
        old.clear()
        old.update(items)
    elif type(old) in (torch.Tensor, nn.Parameter) and _is_alike(old, new):
        filled[id(old)] = new
        with torch.no_grad():
            old.copy_(new)
    else:
        return new
    return old


def _held(thing: Any, seen: set[int]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the containers and tensors that an object has as attributes: attributes, name, value.

    Also those of objects with a state inside it, such as a scheduler of several schedulers.
    """
    attributes = getattr(thing, "__dict__", None)
    if attributes is None or id(thing) in seen:
        return
    seen.add(id(thing))
    for key, value in attributes.items():
        if isinstance(value, list | dict | torch.Tensor):
            yield attributes, key, value
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            own = isinstance(part, nn.Module | torch.optim.Optimizer)  # they have another rule
            if not own and not isinstance(part, type) and hasattr(part, "load_state_dict"):
                yield from _held(part, seen)


def _ids(state: Any) -> set[int]:
    """Return the identities of all containers and tensors in a state."""
    if isinstance(state, dict):
        return {id(state)}.union(*map(_ids, state.values()))
    if isinstance(state, list | tuple):
        return {id(state)}.union(*map(_ids, state))
    return {id(state)} if isinstance(state, torch.Tensor) else set()


def _is_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether one tensor can take the other's values in place, and is then equal to it."""
    form = (new.dtype, new.device, new.shape, new.stride())
    return not old.is_inference() and form == (old.dtype, old.device, old.shape, old.stride())


def distribute(state: Any, live: Any, path: str) -> Any:
    """Give the shards in a state the mesh and placement of the live values at the same places.

    Raises SessionError: a live value is not distributed.
    """
    if isinstance(state, LocalShard):
        if not hasattr(live, "device_mesh"):
            raise SessionError(
                f"{path} is a distributed tensor in the state, but not in the running script"
            )
        return like(live, state.tensor)
    if isinstance(state, dict):
        for key, value in state.items():
            inner = live.get(key) if isinstance(live, dict) else None
            state[key] = distribute(value, inner, f"{path}.{key}")
    elif isinstance(state, list | tuple) and not isinstance(state, torch.Size):
        pairs = itertools.zip_longest(state, live if isinstance(live, list | tuple) else ())
        numbered = enumerate(list(pairs)[: len(state)])
        inside = [distribute(a, b, f"{path}.{i}") for i, (a, b) in numbered]
        return inside if isinstance(state, list) else tuple.__new__(type(state), inside)
    return state


def like(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor like a parameter, with `shard` as this rank's piece."""
    from torch.distributed.tensor import DTensor  # already imported by then

    distributed: torch.Tensor = DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return distributed
