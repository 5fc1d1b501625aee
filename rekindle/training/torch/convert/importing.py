"""Make a checkpoint for a Session from a file of torch.save or a folder of torch's DCP.

Nothing in the source is executed: torch reads it with weights_only=True, or dcp_reader reads it.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from rekindle import names
from rekindle.checkpoints.format import (
    METADATA_POSITION,
    checksum,
    plan_layout,
    state_file,
    write_header,
)
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.store import CheckpointFile, CheckpointStore, Written
from rekindle.errors import CheckpointError, CorruptError, SessionError, UsageError
from rekindle.rank.snapshot_writer import METADATA_SKELETON
from rekindle.rank.snapshot_writer import STEP as METADATA_STEP
from rekindle.training.torch.convert.dcp_reader import read_dcp
from rekindle.training.torch.convert.unsharded import REKINDLE, STEP
from rekindle.training.torch.state.capture import view
from rekindle.training.torch.state.nodes import Node
from rekindle.training.torch.state.skeleton import DTYPE_CODES, Reader, Writer, tensor_specs

# Names of the entries in scripts' files, in addition to a Session's names.
_ALIASES = {
    "model": ("model", "model_state_dict", "model_state", "state_dict", "net"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_state", "optim"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler"),
}
_STEPS = (STEP, "global_step", "iteration")
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DDP and torch.compile before each name


class Imported(msgspec.Struct, frozen=True):
    """The states in a source, by a Session's names for them.

    step: the finished steps; None: the source does not give them. left_out: the source's other
    entries.
    """

    tree: dict[str, Node]
    tensors: dict[str, torch.Tensor]
    step: int | None
    position: dict[str, Any]
    left_out: tuple[str, ...] = ()


def read_source(
    source: Path, *, take: Mapping[str, str], add: Mapping[str, Any], device: str
) -> Imported:
    """Read a file of torch.save, or a folder of DCP.

    take: the key of an object's state, if it is not the object's own name. add: states that the
    source lacks. device: the device of the model and of the tensors that the optimizer keeps for
    it.
    Raises UsageError: the source lacks an entry; CorruptError, CheckpointError: it cannot be read
    safely.
    """
    if source.is_dir():
        values, paths = read_dcp(source)
        if REKINDLE in values and not take and not add:
            return _exported(source, values)
        found = _nested(values, paths)
        found.pop(REKINDLE, None)
    else:
        found = _read_file(source)
    chosen = _choose(source, found, take)
    states = {name: _normal(name, found[key]) for name, key in chosen.items()} | dict(add)
    for name in ("model", "optimizer"):
        if name not in states:
            raise UsageError(
                f"{source} has no {name!r}, which a Session needs; it has "
                f"{', '.join(map(repr, found)) or 'nothing'}. Give the key with --take {name}=KEY"
            )
    writer = Writer()
    try:
        tree = {name: writer.encode(state, name) for name, state in states.items()}
    except SessionError as error:
        raise CheckpointError(f"{source}: {error}") from error
    for name, tensor in writer.tensors.items():
        _check_memory(source, name, tensor)
    if device != "cpu":
        tree = {name: _moved(node, device) for name, node in tree.items()}
    step = next((s for k in _STEPS if (s := _whole(found.get(k))) is not None), None)
    left_out = tuple(str(key) for key in found if key not in {*chosen.values(), *_STEPS})
    return Imported(tree, writer.tensors, step, _position(states.get("sampler")), left_out)


def write(imported: Imported, store: CheckpointStore, *, job_id: str, step: int) -> Written:
    """Commit the state as a checkpoint of one file, in generation 0, which is no job's generation.

    An import that is repeated writes nothing. Raises CheckpointError: it cannot be written, or
    another job's checkpoint, or another content, has this name.
    """
    metadata = {
        METADATA_STEP: str(step),
        METADATA_SKELETON: msgspec.json.encode(imported.tree).decode(),
        METADATA_POSITION: msgspec.json.encode(imported.position).decode(),
    }
    tensors = imported.tensors
    layout = plan_layout(
        ((name, DTYPE_CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()),
        metadata_room=len(msgspec.json.encode(metadata)),
    )
    buffer = memoryview(bytearray(layout.total_bytes))
    write_header(layout, metadata, buffer)
    for spec in layout.specs:
        tensor = tensors[spec.name]
        view(buffer, tensor.dtype, spec.shape, layout.header_bytes + spec.begin).copy_(tensor)
    manifest = Manifest(
        job_id=job_id,
        step=step,
        generation=0,
        world_size=1,
        framework="torch",
        data_position=imported.position,
        created=time.time(),
        writer=f"{socket.gethostname()}:{os.getpid()}",
        rekindle=names.VERSION,
    )
    written = store.write(manifest, {state_file(0): CheckpointFile([buffer], (0,))})
    if written.existed:
        there = store.find(step, 0)
        if there is None or there.manifest.files[0].checksum != checksum([buffer]):
            raise CheckpointError(
                f"{written.location} exists already, with other content; import into another store"
            )
    return written


def _read_file(source: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            found = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{source} contains more than tensors and plain values, so Rekindle does not load "
            f"it: {reason}. Save only state dicts"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{source} is not a file of torch.save: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{source} contains a {type(found).__name__}, not a dictionary of states")
    return found


def _exported(source: Path, values: Mapping[str, Any]) -> Imported:
    """Return the state that save_dcp() wrote: its skeleton holds the facts that DCP drops."""
    try:
        tree: dict[str, Node] = msgspec.json.decode(values[REKINDLE])
        tensors = {}
        for spec in (spec for node in tree.values() for spec in tensor_specs(node)):
            tensor = tensors[spec.name] = values[spec.name]
            if (DTYPE_CODES[tensor.dtype], list(tensor.shape)) != (spec.code, spec.shape):
                raise ValueError(f"{spec.name} is {tensor.dtype} of {tuple(tensor.shape)}")
        sampler = Reader(dict(tensors)).decode(tree.get("sampler"))
    except (LookupError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise CorruptError(
            f"{source} is a file of Rekindle, but has changed since the export: {error!r}"
        ) from error
    return Imported(tree, tensors, _whole(values.get(STEP)), _position(sampler))


def _nested(
    values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]
) -> dict[str, Any]:
    """Return the state that DCP has flattened; dictionaries with keys 0, 1, ... become lists."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        inner = root
        *parents, last = paths[name]
        for key in parents:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise CorruptError(f"{name} is inside of a plain value")
        inner[last] = value
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(each) for key, each in value.items()}
    numbers = all(type(key) is int for key in inner) and sorted(inner) == [*range(len(inner))]
    return [inner[number] for number in range(len(inner))] if inner and numbers else inner


def _choose(source: Path, found: Mapping[str, Any], take: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each object's state in the source."""
    for name, key in take.items():
        if key not in found:
            raise UsageError(f"--take {name}={key}: {source} has {', '.join(map(repr, found))}")
    chosen = dict(take)
    for name, aliases in _ALIASES.items():
        for key in [alias for alias in aliases if isinstance(found.get(alias), Mapping)]:
            chosen.setdefault(name, key)
    for key, value in found.items():
        if key not in chosen.values() and isinstance(key, str) and isinstance(value, Mapping):
            chosen.setdefault(key, key)
    return chosen


def _normal(name: str, state: Any) -> Any:
    """Return the state in the form that such an object's load_state_dict() takes."""
    if name == "model" and isinstance(state, Mapping):
        return OrderedDict((_bare(key, state), value) for key, value in state.items())
    if isinstance(state, dict) and isinstance(state.get("param_groups"), list):
        return _optimizer(state)
    return state


def _bare(key: str, state: Mapping[str, Any]) -> str:
    """Return a parameter's name without the prefixes that wrappers have put before all names."""
    for prefix in _WRAPPERS:
        if all(each.startswith(prefix) for each in state):
            state = {each[len(prefix) :]: None for each in state}
            key = key[len(prefix) :]
    return key


def _optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by its parameters' numbers, even if it was saved by names."""
    groups = [dict(group) for group in state["param_groups"]]
    numbers: dict[Any, int] = {}
    for group in groups:
        for each in group.get("params", []):
            numbers.setdefault(each, len(numbers))
        if any(isinstance(each, str) for each in group.get("params", [])):
            group["params"] = [numbers[each] for each in group["params"]]
    by_name = {str(each): number for each, number in numbers.items()}
    kept = {by_name.get(str(key), key): value for key, value in state.get("state", {}).items()}
    return {**state, "state": kept, "param_groups": groups}


def _moved(node: Node, device: str) -> Node:
    """Return the node with its tensors on this device; counters of optimizers stay on the CPU."""
    if isinstance(node, dict):
        [(kind, body)] = node.items()
        if kind == "tensor":
            stays = body[0].endswith(".step") and not body[2]
            return {kind: [*body[:3], "cpu" if stays else device, body[4]]}
        return {kind: _moved(body, device)}
    return [_moved(each, device) for each in node] if isinstance(node, list) else node


def _check_memory(source: Path, name: str, tensor: torch.Tensor) -> None:
    """Check a tensor's size. Raises CorruptError: it repeats a few bytes, and has too few."""
    needed, there = tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()
    if needed > there:
        raise CorruptError(f"{source}: {name} needs {needed} bytes, but has {there}")


def _position(sampler: Any) -> dict[str, Any]:
    return sampler if isinstance(sampler, dict) else {}


def _whole(value: Any) -> int | None:
    if torch.is_tensor(value) and value.numel() == 1:
        value = value.item()
    return value if type(value) is int and value >= 0 else None
