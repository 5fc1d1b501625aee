"""Take a rank's state from the store: only its own bytes, from any number of writing ranks.

A rank begins with the file at its place (2 ranks read 4 files: they begin with files 0 and 2). It
then reads the nearest other files until it has all of its pieces. Undivided values come from the
first file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rekindle.checkpoints.checkpoint_path import entry_of
from rekindle.checkpoints.format import Header, state_file
from rekindle.checkpoints.open_store import find_checkpoint
from rekindle.checkpoints.resharding import Box, Excerpts, nearest, overlap, takes, without
from rekindle.checkpoints.store import Checkpoint, reading
from rekindle.errors import CorruptError, SessionError
from rekindle.rank.progress import RankPlace
from rekindle.rank.snapshot_writer import METADATA_SKELETON
from rekindle.states import StateId
from rekindle.training.torch.state.capture import DTYPE_CODES, as_bytes, finish, prepare
from rekindle.training.torch.state.sharding import (
    METADATA_PIECES,
    GivenValues,
    Piece,
    Refit,
    pieces_in,
    values_in,
)

_TAKE_BYTES = 16 << 20  # bytes per read, if the layouts of file and tensor differ
_STRAIGHT_BYTES = 16 << 20  # bytes, if the layouts agree: a separate read then saves a copy


class _Move(NamedTuple):
    """Bytes of a file; `source` (in an array of `shape`) selects the elements for part of a tensor.

    straight: the memory of that part, if the bytes go there without a change.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: torch.Tensor
    straight: memoryview | None = None


def load_checkpoint(
    location: str, named: Mapping[str, Any], state: StateId, place: RankPlace
) -> GivenValues | None:
    """Take a state from the store, or only this rank's part of a sharded state.

    Returns the values with which the script began that state, if the file has them.
    Raises CheckpointError: the checkpoint is missing; CorruptError: a file has changed since it was
    written; SessionError: the state belongs to another model, or its pieces cannot be combined.
    """
    store, found = find_checkpoint(location, state)
    # One pin per node is enough: its ranks read at the same time, and a thousand pins take long.
    one = os.environ.get("LOCAL_RANK", "0") == "0"
    with reading(store, state) if one else contextlib.nullcontext():
        return _load(found, named, place)


def _load(found: Checkpoint, named: Mapping[str, Any], place: RankPlace) -> GivenValues | None:
    written, own = len(found.manifest.files), (place.shard or 0) if place.shards > 1 else 0
    first = own if written == place.shards else own * written // place.shards
    source = _open(found, first)
    header = source.header()
    skeleton, wanted = header.metadata[METADATA_SKELETON].encode(), pieces_in(header)
    is_described = written == 1 or METADATA_PIECES in header.metadata
    if is_described and (place.shards == 1 or place.mesh is not None):
        refit = Refit(wanted, again=written != place.shards)
        skeleton, wanted = refit.skeleton(named, skeleton), refit.wanted
    elif written != place.shards:
        raise SessionError(
            f"{found.location} has the state in {written} pieces, but this job has "
            f"{place.shards}, and Rekindle does not know their positions. Resume the job with "
            "the same number of ranks and the same sharding"
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
    return values_in(header)


def _open(checkpoint: Checkpoint, number: int) -> Excerpts:
    return Excerpts(
        checkpoint, entry_of(checkpoint.location, checkpoint.manifest, state_file(number))
    )


class _Left:
    """The parts of tensors that are not filled yet, by the tensors' names."""

    def __init__(self, targets: Mapping[str, torch.Tensor], wanted: Mapping[str, Piece]) -> None:
        self._targets = targets
        self._wanted = wanted
        self._boxes = {name: [wanted[name].box] for name in targets if wanted[name].box.size}

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors that are not complete yet."""
        return self._boxes.keys()

    def fill(self, source: Excerpts, header: Header) -> None:
        """Fill the parts that are in this file; the rest of the file is not read."""
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
                    f"the files disagree about {spec.name}: {spec.dtype} of shape "
                    f"{list(piece.shape)} in one file, {DTYPE_CODES[target.dtype]} of "
                    f"{list(wanted.shape)} in another"
                )
            begin = header.data_begin + spec.begin
            for common in self._claim(spec.name, piece.box):
                yield from _moves(begin, piece.box, common, wanted.box, target)

    def _claim(self, name: str, there: Box) -> list[Box]:
        """Return the missing parts of this tensor that are in the file, and mark them as filled."""
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
    """Yield the moves of the elements that a piece in the file and the piece of this rank share."""
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
