"""A PyTorch rank's state into its agent's memory, and back, verified."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rekindle.checkpoints.format import read_header
from rekindle.protocol.snapshot_buffer import (
    BLOCK_BYTES,
    SnapshotBuffer,
    block_of,
    blocks_of,
    digest,
)
from rekindle.rank.channel import Channel
from rekindle.rank.held_state import RankPlace
from rekindle.rank.snapshot_writer import METADATA_SKELETON, Captured, SnapshotWriter, kept
from rekindle.recovery.policy.plan import Made
from rekindle.training.torch import private
from rekindle.training.torch.state.capture import DTYPE_CODES, capture, finish, prepare, view
from rekindle.training.torch.state.sharding import metadata_of

_Copy = tuple[torch.Tensor, torch.Tensor]  # to, and from
_Move = tuple[int, int, int]  # to and from which address, and how many bytes


def copy_verified(buffer: SnapshotBuffer, targets: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Fill each tensor with the bytes of the buffer's file that begin there.

    Raises CorruptError: the file is not what was sealed; the tensors then hold anything.
    """
    file = buffer.file
    count = blocks_of(len(file))
    pieces: list[list[_Move]] = [[] for _ in range(count)]
    others: list[_Copy] = []
    for target, begin in targets:
        lazy = target.is_conj() or target.is_neg()  # its bytes are not its values
        if target.device.type == "cpu" and target.is_contiguous() and not lazy:
            _cut(target, file, begin, pieces)
        else:  # to a device only the thread that trains copies: in the order of its stream
            others.append((target, view(file, target.dtype, tuple(target.shape), begin)))
    digests = [b""] * count
    left = deque(range(count))

    def work() -> None:
        while left:
            try:
                number = left.popleft()
            except IndexError:
                return  # the other thread was quicker
            digests[number] = digest(block_of(file, number))
            for move in pieces[number]:
                # Not a copy by torch: each of the two threads would bring its own OpenMP threads.
                ctypes.memmove(*move)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rekindle-restore") as helper:
        helped = helper.submit(work)
        _copy(others)
        work()
        helped.result()
    buffer.verify(digests)


def _cut(target: torch.Tensor, file: memoryview, begin: int, pieces: list[list[_Move]]) -> None:
    """Cut a tensor where the blocks of the file end, and add each piece to those of its block."""
    size = target.nbytes
    if size == 0:
        return
    to = target.data_ptr()
    source = torch.frombuffer(file, dtype=torch.uint8, count=size, offset=begin).data_ptr()
    done = 0
    while done < size:
        number = (begin + done) // BLOCK_BYTES
        end = min(size, (number + 1) * BLOCK_BYTES - begin)
        pieces[number].append((to + done, source + done, end - done))
        done = end


def _copy(copies: Iterable[_Copy]) -> None:
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)


class TorchSnapshotWriter(SnapshotWriter):
    """Copies live tensors. seed: of the random streams, for whoever reads a checkpoint."""

    def __init__(self, channel: Channel, place: RankPlace, *, seed: int) -> None:
        super().__init__(channel, place)
        self._seed = seed

    def capture(self, named: Mapping[str, Any], place: RankPlace, *, before: object) -> Captured:
        """Read the state of live objects, without a copy."""
        state = capture(named)
        forms = tuple((n, DTYPE_CODES[t.dtype], tuple(t.shape)) for n, t in state.tensors.items())
        said = metadata_of(state, place, seed=self._seed) if forms != before else None
        return Captured(state.skeleton, state.tensors, forms, said)

    def views(
        self, data: memoryview, state: Captured, begins: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Tensors that lie in the buffer."""
        named = state.tensors.items()
        return [view(data, t.dtype, tuple(t.shape), begins[name]) for name, t in named]

    def copy(self, views: Sequence[torch.Tensor], state: Captured) -> None:
        """Copy all in one call: small tensors cost a call each more than their bytes."""
        private.copy_all(list(views), list(state.tensors.values()))


def load_snapshot(
    channel: Channel, slot: int, named: Mapping[str, Any], made: Made, *, copy: bool = False
) -> None:
    """Take a state from the agent's memory; a copy is brought there first.

    Raises CheckpointError: it is not there; CorruptError: it is not what was sealed.
    """
    with kept(channel, slot, made, copy=copy) as buffer:
        load(named, buffer)


def load(named: Mapping[str, Any], buffer: SnapshotBuffer) -> None:
    """Fill the live objects from the file in the buffer; what is used of it has been verified.

    Raises CorruptError: it is not what was sealed; SessionError: it is another model's.
    """
    file = buffer.file
    try:
        header = read_header(file)
        begins = {spec.name: header.data_begin + spec.begin for spec in header.specs}
        targets = prepare(named, header.metadata[METADATA_SKELETON].encode())
        filled = [(target, begins[name]) for name, target in targets.items()]
    except Exception:
        buffer.verify()  # what is damaged may raise anything: then that is the error
        raise
    copy_verified(buffer, filled)
    finish(named)
