"""Read the state of live training objects without a copy, and fill it in place.

A state is a skeleton (JSON, see rekindle.training.torch.state.skeleton) and the tensors that the
skeleton names.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
from torch import nn

from rekindle.errors import SessionError
from rekindle.training.torch.private import uncompiled_name
from rekindle.training.torch.state.in_place import (
    Stateful,
    adopt,
    distribute,
    like,
    load_in_place,
    state_of,
)
from rekindle.training.torch.state.nodes import LiveParts, Node
from rekindle.training.torch.state.skeleton import (
    DTYPE_CODES,
    TORCH_DTYPES,
    LocalShard,
    Reader,
    Writer,
    difference,
    is_late,
    tensor_specs,
)
from rekindle.training.torch.state.tensor_forms import is_flattened

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

PARTS = "per_rank"  # the state of single ranks; a job without such state ignores it
_EXTRA_STATE = "_extra_state"  # torch's suffix for the value of a module's get_extra_state()
_pending: _Pending | None = None


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
    tree = {name: writer.encode(state_of(thing), name) for name, thing in named.items()}
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
    if PARTS not in named:
        tree.pop(PARTS, None)
    if not named.keys() - optional <= tree.keys() <= named.keys():
        raise SessionError(f"the state has {sorted(tree)}, but the session has {sorted(named)}")
    pending = _pending = _Pending(skeleton)
    for name, node in tree.items():
        thing = named[name]
        if isinstance(thing, nn.Module):
            _prepare_module(name, thing, node, pending)
        elif isinstance(thing, torch.optim.Optimizer):
            _prepare_optimizer(name, thing, node, pending)
        else:
            _prepare_other(name, thing, node, pending)
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
    for load in pending.load:
        load()
    found = capture(named).skeleton
    if found == pending.skeleton:
        return
    wanted_tree, found_tree = msgspec.json.decode(pending.skeleton), msgspec.json.decode(found)
    for name, node in wanted_tree.items():
        wrong = difference(node, found_tree[name], name)
        if wrong is not None:
            raise SessionError(f"load_state_dict() did not load the state: {wrong}")


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
            if "training" in vars(part)  # a wrapper of torch.compile shows that of its module
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
    load: list[Callable[[], Any]] = field(default_factory=list)  # after the tensors are filled

    def add(self, node: Node) -> None:
        """Add unfilled tensors for those below the node, for values that are made later."""
        for spec in tensor_specs(node):
            self.writer.tensors.setdefault(spec.name, spec.make())


def _encode(tree: dict[str, Node]) -> bytes:
    try:
        return msgspec.json.encode(tree)
    except (UnicodeEncodeError, RecursionError) as error:
        raise SessionError(f"JSON cannot represent the state: {error}") from error


def _prepare_module(name: str, module: nn.Module, node: Node, pending: _Pending) -> None:
    """Prepare to fill parameters and buffers in place, because optimizers hold them."""
    live = state_of(module)
    [(kind, pairs)] = node.items()
    late = [pair for pair in pairs if pair[0].endswith(_EXTRA_STATE) or _is_rebuilt(pair[1])]
    plain = [pair for pair in pairs if pair not in late]
    names = {key for key, _ in late} | {key for key in live if key.endswith(_EXTRA_STATE)}
    inner = {key: value for key, value in live.items() if key not in names}
    wrong = difference({kind: plain}, {kind: pending.writer.pairs(inner, name)}, name)
    if wrong is not None:
        raise SessionError(f"the state belongs to another model: {wrong}")
    for _, each in late:
        pending.add(each)

    def load() -> None:
        reader = Reader(pending.writer.tensors, _live_parts(live, name))
        state = {**inner, **{key: reader.decode(each) for key, each in late}}
        own = {uncompiled_name(key): key for key in module.state_dict()}
        module.load_state_dict({own.get(key, key): each for key, each in state.items()})

    if late:
        pending.load.append(load)


def _is_rebuilt(node: Node) -> bool:
    """Return whether a tensor in a module's state has no memory that could be filled in place."""
    return isinstance(node, dict) and not node.keys().isdisjoint(
        ("quantized", "quantized_channels")
    )


def _prepare_other(name: str, thing: Stateful, node: Node, pending: _Pending) -> None:
    """Prepare to load the state of an object that takes a complete state."""
    live = thing.state_dict()
    parts = _live_parts(live, name)
    pending.add(node)

    def load() -> None:
        state = Reader(pending.writer.tensors, parts).decode(node)
        load_in_place(thing, distribute(state, live, name))

    pending.load.append(load)


def _live_parts(state: Any, name: str) -> LiveParts:
    """Return the classes and functions in a live state."""
    writer = Writer()
    writer.encode(state, name)
    return writer.live


def _prepare_optimizer(
    name: str, optimizer: torch.optim.Optimizer, node: Node, pending: _Pending
) -> None:
    """Load the optimizer with its own tensors if they fit, otherwise with new, unfilled ones."""
    live = Writer()
    live.encode(optimizer.state_dict(), name)
    if is_late(node):
        pending.add(node)
        tensors = pending.writer.tensors
        pending.load.append(functools.partial(_load_optimizer, optimizer, node, tensors, live.live))
        return
    at_hand = dict(pending.writer.tensors)
    for spec in tensor_specs(node):
        if spec.name in live.tensors and spec.fits(live.tensors[spec.name]):
            at_hand[spec.name] = live.tensors[spec.name]
    _load_optimizer(optimizer, node, at_hand, live.live)
    wrong = difference(node, pending.writer.encode(optimizer.state_dict(), name), name)
    if wrong is not None:
        raise SessionError(f"the optimizer did not load the state: {wrong}")


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    node: Node,
    tensors: dict[str, torch.Tensor],
    live: LiveParts,
) -> None:
    state = Reader(tensors, live).decode(node)
    _distribute(optimizer, state)
    groups, entries = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    _undo_casts(optimizer, state)
    # A script may hold a group, or the list of groups: a schedule by hand sets the rate there.
    filled: dict[int, Any] = {}
    optimizer.param_groups = adopt(groups, optimizer.param_groups, filled)
    optimizer.state = adopt(entries, optimizer.state, filled)


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
                entries[key] = like(own, value.tensor)


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
            if isinstance(value, str) or is_flattened(type(value)):
                loaded[key] = value  # the second: a copy has other inner tensors
            elif isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
