"""A rank's state out of the store: its own bytes alone, however many ranks have written them.

A rank begins with the file in whose place it is (of 4 files that 2 ranks read, 0 and 2), and goes
on to the nearest others until it has all of its pieces. What is not cut up is that file's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rekindle.checkpoints.format import Header, state_file
from rekindle.checkpoints.open_store import find_checkpoint
from rekindle.checkpoints.pins import reading
from rekindle.checkpoints.resharding import Box, Excerpts, nearest, overlap, takes, without
from rekindle.checkpoints.store import Checkpoint
from rekindle.errors import CorruptError, SessionError
from rekindle.rank.held_state import RankPlace
from rekindle.rank.snapshot_writer import METADATA_SKELETON
from rekindle.recovery.policy.plan import Made
from rekindle.training.torch.state.capture import DTYPE_CODES, as_bytes, finish, prepare
from rekindle.training.torch.state.sharding import METADATA_PIECES, Piece, Refit, pieces_in

_TAKE_BYTES = 16 << 20  # at a time, of what does not lie here as it lies there
_STRAIGHT_BYTES = 16 << 20  # of what does: the copy that is saved is worth a read of its own


class _Move(NamedTuple):
    """Bytes of a file, of which `source` (of an array of `shape`) goes to a part of a tensor.

    straight: the memory of that part, if the bytes go there as they are.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: torch.Tensor
    straight: memoryview | None = None


def load_checkpoint(location: str, named: Mapping[str, Any], made: Made, place: RankPlace) -> None:
    """Take a state from the store; of a sharded one what this rank holds of it.

    Raises CheckpointError: it is not there; CorruptError: a file is not what was written;
    SessionError: it is of another model, or in pieces that cannot be put together anew.
    """
    store, found = find_checkpoint(location, made)
    # One of each node is enough: they read at the same time, and a thousand pins take theirs.
    one = os.environ.get("LOCAL_RANK", "0") == "0"
    with reading(store, made) if one else contextlib.nullcontext():
        _load(found, named, place)


def _load(found: Checkpoint, named: Mapping[str, Any], place: RankPlace) -> None:
    written, own = len(found.manifest.files), (place.shard or 0) if place.shards > 1 else 0
    first = own if written == place.shards else own * written // place.shards
    source = _open(found, first)
    header = source.header()
    skeleton, wanted = header.metadata[METADATA_SKELETON].encode(), pieces_in(header)
    told = written == 1 or METADATA_PIECES in header.metadata
    if told and (place.shards == 1 or place.mesh is not None):
        refit = Refit(wanted, again=written != place.shards)
        skeleton, wanted = refit.skeleton(named, skeleton), refit.wanted
    elif written != place.shards:
        raise SessionError(
            f"{found.location} has the state in {written} pieces, this job in {place.shards}, and "
            "what they are pieces of is not known: resume it with as many ranks and the same "
            "sharding"
        )
    left = _Left(prepare(named, skeleton), wanted)
    left.fill(source, header)
    for number in nearest(first, written):
        if left.names and number != first:
            source = _open(found, number)
            left.fill(source, source.header())
    if left.names:
        raise CorruptError(f"{found.location}: no file has all of {min(left.names)}")
    finish(named)


def _open(checkpoint: Checkpoint, number: int) -> Excerpts:
    name = state_file(number)
    for entry in checkpoint.manifest.files:
        if entry.name == name:
            return Excerpts(checkpoint, entry)
    raise CorruptError(f"{checkpoint.location}: the manifest names no file {name}")


class _Left:
    """What is still to be filled of some tensors, by their names."""

    def __init__(self, targets: Mapping[str, torch.Tensor], wanted: Mapping[str, Piece]) -> None:
        self._targets = targets
        self._wanted = wanted
        self._boxes = {name: [wanted[name].box] for name in targets if wanted[name].box.size}

    @property
    def names(self) -> Collection[str]:
        """The tensors that are not filled yet."""
        return self._boxes.keys()

    def fill(self, source: Excerpts, header: Header) -> None:
        """Take what there is of them in a file; nothing else of it is read."""
        some: list[_Move] = []
        for move in sorted(self._moves(header), key=lambda move: move.begin):
            if move.straight is None:
                some.append(move)
            else:
                _copy(source, some)
                some = []
                source.fill(move.begin, move.straight)
        _copy(source, some)

    def _moves(self, header: Header) -> Iterator[_Move]:
        pieces = pieces_in(header)
        for spec in header.specs:
            if spec.name not in self._boxes:
                continue
            piece, target = pieces[spec.name], self._targets[spec.name]
            wanted = self._wanted[spec.name]
            if (spec.dtype, piece.shape) != (DTYPE_CODES[target.dtype], wanted.shape):
                raise CorruptError(
                    f"{spec.name} is not one tensor: {spec.dtype} of shape {list(piece.shape)} in "
                    f"one file, {DTYPE_CODES[target.dtype]} of {list(wanted.shape)} in another"
                )
            begin = header.data_begin + spec.begin
            for common in self._claim(spec.name, piece.box):
                yield from _moves(begin, piece.box, common, wanted.box, target)

    def _claim(self, name: str, there: Box) -> list[Box]:
        """What is still wanted of this tensor and is there; from now on it is not wanted."""
        found: list[Box] = []
        left: list[Box] = []
        for box in self._boxes.pop(name):
            common = overlap(box, there)
            found += [common] if common else []
            left += without(box, common) if common else [box]
        if left:
            self._boxes[name] = left
        return found


def _moves(begin: int, there: Box, common: Box, here: Box, target: torch.Tensor) -> Iterator[_Move]:
    """How what two pieces have in common gets from the file, where one begins, to the other."""
    element = target.element_size()
    [take] = takes(there, common, here, element=element, most=sys.maxsize)
    part, size = target[take.target], take.end - take.begin
    alike = part.shape == take.shape and part.is_contiguous() and part.device.type == "cpu"
    if alike and size >= _STRAIGHT_BYTES:
        at, memory = begin + take.begin, as_bytes(part).numpy().data
        yield _Move(at, at + size, take.shape, take.source, part, memory)
        return
    for take in takes(there, common, here, element=element, most=_TAKE_BYTES):
        at, part = begin + take.begin, target[take.target]
        yield _Move(at, begin + take.end, take.shape, take.source, part)


def _copy(source: Excerpts, moves: Sequence[_Move]) -> None:
    read = source.read((move.begin, move.end) for move in moves)
    with torch.no_grad():
        for move, data in zip(moves, read, strict=True):
            there = torch.frombuffer(data, dtype=move.target.dtype).view(move.shape)
            move.target.copy_(there[move.source])
