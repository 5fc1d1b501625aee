"""Read the state of live training objects without a copy, and fill it in place.

A state is a skeleton (JSON, see rekindle.training.torch.state.skeleton) and the tensors that the
skeleton names.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
import torch
from torch import nn

from rekindle.errors import SessionError
from rekindle.training.torch.state.skeleton import (
    DTYPE_CODES,
    TORCH_DTYPES,
    LocalShard,
    Node,
    Reader,
    Writer,
    difference,
    tensor_specs,
)

__all__ = [
    "DTYPE_CODES",
    "TORCH_DTYPES",
    "CapturedState",
    "as_bytes",
    "capture",
    "finish",
    "prepare",
]

P = ParamSpec("P")
R = TypeVar("R")

_EXTRA_STATE = "_extra_state"  # torch's suffix for the value of a module's get_extra_state()


class Stateful(Protocol):
    """An object with a state: a module, an optimizer, a scheduler, a sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A skeleton and its tensors by name: the live tensors, not copies.

    distributed: the DTensors that have some of the tensors as this rank's pieces, by name.
    """

    skeleton: bytes
    tensors: dict[str, torch.Tensor]
    distributed: dict[str, Any]


def _without_gc(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function without garbage collection during its run.

    Its thousands of nodes would trigger full collections, and each collection visits all objects of
    torch. They take longer than the function itself; no code here makes reference cycles.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return run


@_without_gc
def capture(named: Mapping[str, Stateful]) -> CapturedState:
    """Return the state of live objects; tensors are named by paths: optimizer.state.0.exp_avg.

    Raises SessionError: a skeleton cannot hold a value; the text names its place.
    """
    writer = Writer()
    tree = {name: writer.encode(thing.state_dict(), name) for name, thing in named.items()}
    return CapturedState(_encode(tree), writer.tensors, writer.distributed)


@_without_gc
def prepare(named: Mapping[str, Stateful], skeleton: bytes) -> dict[str, torch.Tensor]:
    """Give live objects the structure of `skeleton`; return the tensors to fill in place.

    The tensors are in the order of the captured state. The caller fills them and then calls
    finish().
    Raises SessionError: the objects cannot take the structure, which belongs to another model.
    """
    global _pending
    tree = msgspec.json.decode(skeleton)
    optional = {name for name, thing in named.items() if getattr(thing, "optional", False)}
    if tree.keys() != named.keys() and tree.keys() != named.keys() - optional:
        raise SessionError(f"the state has {sorted(tree)}, but the session has {sorted(named)}")
    pending = _pending = _Pending(skeleton)
    for name, node in tree.items():
        thing = named[name]
        if isinstance(thing, nn.Module):
            _prepare_module(name, thing, node, pending)
        elif isinstance(thing, torch.optim.Optimizer):
            _prepare_optimizer(name, thing, node, pending)
        else:
            state = Reader(pending.writer.tensors).decode(node)
            pending.load[name] = distribute(state, thing.state_dict(), name)
    tensors = pending.writer.tensors
    return {spec.name: tensors[spec.name] for node in tree.values() for spec in tensor_specs(node)}


@_without_gc
def finish(named: Mapping[str, Stateful]) -> None:
    """Load the values that could not be filled in place; call it once after each prepare().

    Raises SessionError: the objects' state differs from the prepared one.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is None:
        raise SessionError("finish() without prepare()")
    for name, state in pending.load.items():
        load_in_place(named[name], state)
    found = capture(named).skeleton
    if found == pending.skeleton:
        return
    wanted_tree, found_tree = msgspec.json.decode(pending.skeleton), msgspec.json.decode(found)
    for name, node in wanted_tree.items():
        wrong = difference(node, found_tree[name], name)
        if wrong is not None:
            raise SessionError(f"load_state_dict() did not load the state: {wrong}")


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
            attributes[key] = _adopt(old, new, filled)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one row of uint8: a view of a contiguous tensor, otherwise a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and the same bits."""
    return one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other))


def view(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> torch.Tensor:
    """Return the tensor at this place in the file, without a copy."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).view(shape)


class Modes:
    """Knows which modules are in evaluation mode. It is a part of the state.

    optional: an imported state lacks it, and then the modes stay.
    """

    optional = True

    def __init__(self) -> None:
        self._modules: dict[str, torch.nn.Module] = {}
        self._attributes: list[dict[str, Any]] = []
        self._kept: list[bool] = []

    def look(self, named: Mapping[str, torch.nn.Module]) -> None:
        """Find all parts of these modules."""
        self._modules = {
            f"{name}.{path}" if path else name: part
            for name, module in named.items()
            for path, part in module.named_modules()
        }
        self._attributes = [vars(part) for part in self._modules.values()]

    def keep(self) -> None:
        """Keep all modes."""
        self._kept = [attributes["training"] for attributes in self._attributes]

    def restore(self) -> None:
        """Restore the kept modes."""
        for part, mode in zip(self._modules.values(), self._kept, strict=True):
            part.training = mode

    def state_dict(self) -> dict[str, list[str]]:
        """Return the names of the modules in evaluation mode; usually there is none."""
        return {"evaluating": [n for n, part in self._modules.items() if not part.training]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all modes."""
        evaluating = set(state["evaluating"])
        for name, part in self._modules.items():
            part.training = name not in evaluating


class ExtraStates:
    """The values of get_extra_state() of all parts of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        plain = torch.nn.Module.get_extra_state
        self.parts = {
            path: part
            for path, part in module.named_modules()
            if type(part).get_extra_state is not plain
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {path: part.get_extra_state() for path, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the values."""
        for path, value in state.items():
            self.parts[path].set_extra_state(value)


@dataclass(slots=True)
class _Pending:
    """The data from prepare() for finish()."""

    skeleton: bytes
    writer: Writer = field(default_factory=Writer)  # only one, since objects may share tensors
    load: dict[str, Any] = field(default_factory=dict)


_pending: _Pending | None = None


def _encode(tree: dict[str, Node]) -> bytes:
    try:
        return msgspec.json.encode(tree)
    except (UnicodeEncodeError, RecursionError) as error:
        raise SessionError(f"JSON cannot represent the state: {error}") from error


def _prepare_module(name: str, module: nn.Module, node: Node, pending: _Pending) -> None:
    """Prepare to fill parameters and buffers in place, because optimizers hold them."""
    live = module.state_dict()
    for key in [key for key in live if key.endswith(_EXTRA_STATE)]:
        del live[key]
    [(kind, pairs)] = node.items()
    extra = [[key, each] for key, each in pairs if key.endswith(_EXTRA_STATE)]
    plain = [pair for pair in pairs if pair not in extra]
    wrong = difference({kind: plain}, pending.writer.encode(live, name), name)
    if wrong is not None:
        raise SessionError(f"the state belongs to another model: {wrong}")
    if extra:
        reader = Reader(pending.writer.tensors)
        live.update((key, reader.decode(each)) for key, each in extra)
        pending.load[name] = live


def _prepare_optimizer(
    name: str, optimizer: torch.optim.Optimizer, node: Node, pending: _Pending
) -> None:
    """Load the optimizer with its own tensors if they fit, otherwise with new, unfilled ones."""
    live = Writer()
    live.encode(optimizer.state_dict(), name)
    at_hand = dict(pending.writer.tensors)
    for spec in tensor_specs(node):
        if spec.name in live.tensors and spec.fits(live.tensors[spec.name]):
            at_hand[spec.name] = live.tensors[spec.name]
    state = Reader(at_hand).decode(node)
    _distribute(optimizer, state)
    groups, entries = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    _undo_casts(optimizer, state)
    # A script may hold a group, or the list of groups: a schedule by hand sets the rate there.
    filled: dict[int, Any] = {}
    optimizer.param_groups = _adopt(groups, optimizer.param_groups, filled)
    optimizer.state = _adopt(entries, optimizer.state, filled)
    wrong = difference(node, pending.writer.encode(optimizer.state_dict(), name), name)
    if wrong is not None:
        raise SessionError(f"the optimizer did not load the state: {wrong}")


def _distribute(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give the shards in an optimizer's state the mesh and placement of their parameters."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return  # its state may have any form
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, LocalShard):
                own = parameters[index]
                if value.tensor.shape != own.to_local().shape:
                    raise SessionError(
                        f"optimizer.state.{index}.{key} is a distributed tensor with another "
                        "sharding than its parameter, which a checkpoint cannot store"
                    )
                entries[key] = _like(own, value.tensor)


def _adopt(old: Any, new: Any, filled: dict[int, Any]) -> Any:
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
        old[:] = [_adopt(a, b, filled) for a, b in pairs]
    elif isinstance(old, dict):
        items = {key: _adopt(old.get(key), value, filled) for key, value in new.items()}
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
        return _like(live, state.tensor)
    if isinstance(state, dict):
        for key, value in state.items():
            inner = live.get(key) if isinstance(live, dict) else None
            state[key] = distribute(value, inner, f"{path}.{key}")
    elif isinstance(state, list | tuple):
        pairs = itertools.zip_longest(state, live if isinstance(live, list | tuple) else ())
        numbered = enumerate(list(pairs)[: len(state)])
        return type(state)(distribute(a, b, f"{path}.{i}") for i, (a, b) in numbered)
    return state


def _like(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
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


def _undo_casts(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Restore values that Optimizer.load_state_dict() changed, and keep its move to the device.

    It casts floating state to the parameter's dtype: it would round the float32 moments of a
    bfloat16 parameter. It also turns a string into the text of a generator.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state["state"].items():
        loaded = optimizer.state[parameters[index]]
        for key, value in entries.items():
            if isinstance(value, str):
                loaded[key] = value
            elif isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
