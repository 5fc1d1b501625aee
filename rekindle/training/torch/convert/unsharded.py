"""Write complete states from checkpoints, in torch's own formats.

A file may hold a part of a larger tensor. The file describes the part (`pieces` in its metadata).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import date, time, timedelta, tzinfo
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import torch

from rekindle.checkpoints.files import explained, sync_directory
from rekindle.checkpoints.format import read_header
from rekindle.checkpoints.store import Checkpoint, bytes_of, read_file
from rekindle.errors import CheckpointError, CorruptError, UsageError
from rekindle.rank.snapshot_writer import METADATA_SKELETON
from rekindle.training.torch.convert.dcp_reader import Box, check_cover, fits
from rekindle.training.torch.state.capture import view
from rekindle.training.torch.state.nodes import Node
from rekindle.training.torch.state.sharding import METADATA_PIECES
from rekindle.training.torch.state.skeleton import (
    TORCH_DTYPES,
    LocalShard,
    Reader,
    TensorSpec,
    tensor_specs,
)

STEP = "step"
# The skeleton's facts that DCP drops: DCP turns dictionary keys that are integers into strings.
REKINDLE = "rekindle"
_Shape = tuple[int, ...]

_DECODING_ERRORS = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError),
    RecursionError,
    msgspec.MsgspecError,
    CorruptError,
)


def check_out(out: Path) -> None:
    """Check the path of a new file. Raises UsageError: it exists, or its folder does not."""
    if out.exists():
        raise UsageError(f"{out} exists already; remove it, or give another name")
    if not out.parent.is_dir():
        raise UsageError(f"the folder {out.parent} does not exist; create it first")


def save_torch(states: Mapping[str, Any], step: int, out: Path) -> None:
    """Write a file for torch.load(weights_only=True); it appears when it is complete.

    Raises UsageError: the path exists; CheckpointError: the file cannot be written.
    """
    with _appearing(out) as path:
        torch.save({**states, STEP: step}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def save_dcp(states: Mapping[str, Any], step: int, skeleton: str, out: Path) -> None:
    """Write a folder for torch.distributed.checkpoint; it appears when it is complete.

    Raises UsageError: the path exists; CheckpointError: the folder cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _appearing(out) as path, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(
                {**states, STEP: step, REKINDLE: skeleton},
                storage_writer=FileSystemWriter(path),
                no_dist=True,
            )
        except ValueError as error:  # two names that DCP does not distinguish
            raise CheckpointError(f"DCP cannot store this state: {error}") from error
        except CheckpointException as error:  # a sparse tensor
            causes = "; ".join(str(cause) for cause, _ in error.failures.values())
            raise CheckpointError(f"DCP cannot store this state: {causes}") from error


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a path next to `out` to write to; rename it after success, and remove it otherwise."""
    check_out(out)
    path = out.with_name(f".{out.name}.{os.getpid()}")
    with explained("write", out):
        try:
            yield path
            path.rename(out)
            sync_directory(out.parent)
        except RuntimeError as error:  # torch's writer raises this when the disk is full
            raise CheckpointError(f"cannot write {out}: {error}") from error
        finally:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Loaded:
    """One file of a checkpoint in memory: its skeleton, and its tensors by name.

    pieces: for each tensor that is a part of a larger tensor, the larger tensor's shape and the
    part's offsets in it.
    """

    def __init__(self, checkpoint: Checkpoint, file: str) -> None:
        """Read the file. Raises CorruptError: it has changed since, or its metadata are wrong."""
        self.file = f"{file} of {checkpoint.location}"
        data = read_file(checkpoint, file)
        header = read_header(data)
        with self._explained():
            encoded = header.metadata.get(METADATA_PIECES, "{}")
            self.pieces = msgspec.json.decode(encoded, type=dict[str, tuple[_Shape, _Shape]])
            self.tree: dict[str, Node] = msgspec.json.decode(header.metadata[METADATA_SKELETON])
            specs = {spec.name: spec for spec in header.specs}
            self.tensors: dict[str, torch.Tensor] = {}
            for node in self.tree.values():
                for wanted in tensor_specs(node):
                    spec = specs[wanted.name]
                    if (spec.dtype, list(spec.shape)) != (wanted.code, wanted.shape):
                        raise ValueError(f"{spec} is not {wanted}")
                    dtype, begin = TORCH_DTYPES[spec.dtype], header.data_begin + spec.begin
                    self.tensors[spec.name] = view(data, dtype, spec.shape, begin)

    def whole(self, name: str) -> Node:
        """Return the skeleton of one object as if no tensor were divided into parts."""
        with self._explained():
            return _whole(self.tree[name], self.pieces)

    def state(self, name: str, wholes: Mapping[str, torch.Tensor]) -> Any:
        """Return the state of one object, with these complete tensors instead of their parts."""
        with self._explained():
            return _plain(Reader({**self.tensors, **wholes}).decode(self.tree[name]))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except _DECODING_ERRORS as error:
            raise CorruptError(
                f"{self.file} does not contain a readable state: {error!r}"
            ) from error


class _Wholes:
    """Combine the parts in the files to complete tensors, up to a limit of bytes for each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.tensors: dict[str, torch.Tensor] = {}
        self._boxes: dict[str, list[Box]] = {}

    def add(self, file: Loaded, names: Collection[str]) -> None:
        """Copy the parts in this file. Raises CorruptError: a part exceeds its complete tensor."""
        kept = {s.name for name in names for s in tensor_specs(file.tree[name])}
        for name, (shape, offset) in file.pieces.items():
            part = file.tensors.get(name)
            if part is None or name not in kept:
                continue
            box = (offset, tuple(part.shape))
            whole = self.tensors.get(name)
            if (
                whole is None
                and fits(shape, box)
                and math.prod(shape) * part.itemsize <= self._most
            ):
                whole = self.tensors[name] = torch.empty(shape, dtype=part.dtype)
            if whole is None or tuple(whole.shape) != shape or not fits(shape, box):
                raise CorruptError(
                    f"{file.file} has a part of {name} that is outside of the tensor"
                )
            place = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
            whole[place].copy_(part)
            self._boxes.setdefault(name, []).append(box)

    def check(self) -> None:
        """Check that no part is missing. Raises CorruptError: one is missing."""
        for name, boxes in self._boxes.items():
            try:
                check_cover(name, tuple(self.tensors[name].shape), boxes)
            except ValueError as error:
                raise CorruptError(str(error)) from error


def read_states(checkpoint: Checkpoint, only: Collection[str]) -> tuple[dict[str, Any], str]:
    """Return the states of a checkpoint's objects by name, and its skeleton, with complete tensors.

    only: the requested objects; empty: all. Raises UsageError: the checkpoint has no such object,
    or torch did not write it; CorruptError: it has changed since; CheckpointError: an object's
    state is in pieces without information about their places.
    """
    manifest = checkpoint.manifest
    if manifest.framework != "torch" or not manifest.files:
        raise UsageError(
            f"{checkpoint.location} has a state of {manifest.framework!r}; only checkpoints of "
            "torch can be exported"
        )
    first = Loaded(checkpoint, manifest.files[0].name)
    unknown = sorted(set(only) - first.tree.keys())
    if unknown:
        raise UsageError(
            f"{checkpoint.location} has no {unknown[0]!r}, but {', '.join(first.tree)}"
        )
    names = [name for name in first.tree if not only or name in only]
    wholes = _Wholes(bytes_of(manifest))
    wholes.add(first, names)
    for entry in manifest.files[1:]:  # one at a time: all files together may exceed the memory
        other = Loaded(checkpoint, entry.name)
        _check_same(first, other, names, len(manifest.files))
        wholes.add(other, names)
    wholes.check()
    tree = {name: first.whole(name) for name in names}
    states = {name: first.state(name, wholes.tensors) for name in names}
    return states, msgspec.json.encode(tree).decode()


def _check_same(first: Loaded, other: Loaded, names: Collection[str], files: int) -> None:
    """Compare two files, except parts with a known place. Raises CheckpointError: they differ."""
    for name in names:
        same = name in other.tree and first.whole(name) == other.whole(name)
        if not same or any(_differ(first, other, spec) for spec in tensor_specs(first.tree[name])):
            raise CheckpointError(
                f"the state of {name!r} is in {files} pieces, and the checkpoint does not have "
                "their positions, so Rekindle cannot join them; select objects with a complete "
                "state with --only"
            )


def _differ(first: Loaded, other: Loaded, spec: TensorSpec) -> bool:
    if spec.name in first.pieces and spec.name in other.pieces:
        return False
    one, two = (each.tensors[spec.name].reshape(-1).view(torch.uint8) for each in (first, other))
    return not torch.equal(one, two)


def _whole(node: Node, pieces: Mapping[str, tuple[_Shape, _Shape]]) -> Node:
    """Return the node with complete tensors instead of parts."""
    if isinstance(node, list):
        return [_whole(each, pieces) for each in node]
    if not isinstance(node, dict):
        return node
    [(kind, body)] = node.items()
    if kind not in ("tensor", "shard"):
        return {kind: _whole(body, pieces)}
    spec = TensorSpec(*body)
    if spec.name in pieces:
        spec = spec._replace(shape=list(pieces[spec.name][0]), stride=None)
    return {"tensor": list(spec)}


def _plain(state: Any) -> Any:
    """Return the state with values that torch.load(weights_only=True) reads.

    Complete shards become tensors, numbers of NumPy become Python's, arrays and bytes become
    tensors (arrays without such a dtype: lists), sets and queues become lists, generators their
    states, and dates and paths their texts.
    """
    if isinstance(state, LocalShard):
        return state.tensor
    if isinstance(state, Mapping):
        kind: Any = dict if isinstance(state, defaultdict) else type(state)
        return kind({_plain(key): _plain(value) for key, value in state.items()})
    if type(state) in (list, tuple):
        return type(state)(_plain(value) for value in state)
    for kinds, change in _PLAIN:
        if isinstance(state, kinds):
            return change(state)
    return state


def _plain_array(array: np.ndarray[Any, Any]) -> Any:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # torch has no such dtype
        return _plain(array.tolist())


# The first row that fits a value counts.
_PLAIN: tuple[tuple[tuple[type, ...], Callable[[Any], Any]], ...] = (
    ((set, frozenset, deque), lambda v: [_plain(each) for each in v]),
    ((bytes, bytearray), lambda v: torch.tensor(list(v), dtype=torch.uint8)),
    ((np.ndarray,), _plain_array),
    ((np.generic,), lambda v: _plain(v.item())),
    ((torch.Generator,), lambda v: v.get_state()),
    ((np.random.Generator,), lambda v: _plain(v.bit_generator.state)),
    ((np.random.RandomState,), lambda v: _plain(v.get_state(legacy=False))),
    ((random.Random,), lambda v: v.getstate()),
    ((complex,), lambda v: [v.real, v.imag]),
    ((PurePath, date, time, timedelta, tzinfo), str),
)
