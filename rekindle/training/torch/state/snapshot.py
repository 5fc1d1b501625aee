"""Copy a PyTorch rank's state into its agent's memory, and back, with verification."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from rekindle.rank.progress import RankPlace
from rekindle.rank.snapshot_writer import METADATA_SKELETON, Captured, SnapshotWriter, kept
from rekindle.states import StateId
from rekindle.training.torch import private
from rekindle.training.torch.state.capture import DTYPE_CODES, capture, finish, prepare, view
from rekindle.training.torch.state.digests import digests_of
from rekindle.training.torch.state.sharding import GivenValues, metadata_of

SMALL_BYTES = 64 << 10  # a copy of such a tensor takes microseconds
_log = logging.getLogger(__name__)

_Copy = tuple[torch.Tensor, torch.Tensor]  # target and source
_Move = tuple[int, int, int]  # target address, source address, number of bytes


def copy_verified(buffer: SnapshotBuffer, targets: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Fill each tensor with the bytes of the buffer's file that begin at the given offset.

    Raises CorruptError: the file has changed since it was sealed; the tensors' values are then
    undefined.
    """
    file = buffer.file
    count = blocks_of(len(file))
    pieces: list[list[_Move]] = [[] for _ in range(count)]
    others: list[_Copy] = []
    for target, begin in targets:
        lazy = target.is_conj() or target.is_neg()  # its bytes differ from its values
        if target.device.type == "cpu" and target.is_contiguous() and not lazy:
            _cut(target, file, begin, pieces)
        else:  # to a device only the training thread copies, in the order of its stream
            others.append((target, view(file, target.dtype, tuple(target.shape), begin)))
    digests = [b""] * count
    left = deque(range(count))

    def work() -> None:
        while left:
            try:
                number = left.popleft()
            except IndexError:
                return  # the other thread has taken the last block
            digests[number] = digest(block_of(file, number))
            for move in pieces[number]:
                # Not with torch's copy: each of the two threads would start its own OpenMP threads.
                ctypes.memmove(*move)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rekindle-restore") as helper:
        helped = helper.submit(work)
        _copy(others)
        work()
        helped.result()
    buffer.verify(digests)


def _cut(target: torch.Tensor, file: memoryview, begin: int, pieces: list[list[_Move]]) -> None:
    """Divide a tensor at the ends of the file's blocks, and add each piece to its block's list."""
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


class PinnedMemory:
    """The memory of snapshots that CUDA reads and writes directly.

    A copy from a GPU to other memory passes through a small buffer of the driver. On an H100 it
    moves about 10 GB/s, and about 50 GB/s to registered memory.
    cudart: CUDA's runtime functions.
    """

    def __init__(self, cudart: Any = None) -> None:
        self._cudart = cudart
        self._addresses: list[int] = []

    def add(self, data: memoryview) -> None:
        """Register this memory. Copies are slower, and still correct, if CUDA refuses it."""
        self._cudart = self._cudart or torch.cuda.cudart()
        address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        answer = int(self._cudart.cudaHostRegister(address, len(data), 0))
        if answer == 0:
            self._addresses.append(address)
            return
        _log.warning("CUDA cannot register %d bytes (error %d): slow snapshots", len(data), answer)
        # CUDA also gives a refusal to the next caller that asks for errors: to this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")

    def release(self) -> None:
        """Unregister all memory. It must still be mapped."""
        for address in self._addresses:
            self._cudart.cudaHostUnregister(address)
        self._addresses = []


class FrozenTensors:
    """The large frozen parameters that a buffer has already: a snapshot does not copy them again.

    A script can change them, also without torch's version counter (`tensor.data`). So only a digest
    of the present content counts. It takes less time than a copy: on a GPU it needs no transfer.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._held: dict[int, dict[str, int]] = {}  # digests of the contents, by buffer

    def look(self, named: Mapping[str, Any]) -> None:
        """Find the frozen parameters of all modules, and forget all contents."""
        self._held = {}
        self._names = [
            f"{name}.{path}"
            for name, each in named.items()
            if isinstance(each, torch.nn.Module)
            for path, parameter in each.named_parameters()
            if not parameter.requires_grad and parameter.nbytes > SMALL_BYTES
        ]

    def forget(self) -> None:
        """Forget all contents: the agent may have written to the buffers."""
        self._held = {}

    def copy(self, buffer: int, views: Sequence[torch.Tensor], state: Captured) -> None:
        """Copy the tensors of the state whose content the buffer does not have."""
        tensors = state.tensors
        present = digests_of((name, tensors[name]) for name in self._names if name in tensors)
        held = self._held.pop(buffer, {})  # the buffer has nothing if the copy fails
        left = {name for name, value in present.items() if held.get(name) == value}
        pairs = zip(tensors, views, strict=True)
        targets = [target for name, target in pairs if name not in left]
        private.copy_all(targets, [each for name, each in tensors.items() if name not in left])
        self._held[buffer] = present


class TorchSnapshotWriter(SnapshotWriter):
    """Copies live tensors. values: those of the script, which are in the metadata of a file."""

    def __init__(
        self,
        channel: Channel,
        place: RankPlace,
        *,
        values: GivenValues,
        compared: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        super().__init__(channel, place, compared)
        self._values = values
        self._pinned = PinnedMemory()
        self._frozen = FrozenTensors()
        self._generation = place.generation

    def capture(self, named: Mapping[str, Any], place: RankPlace, *, before: object) -> Captured:
        """Read the state of live objects, without a copy."""
        state = capture(named)
        if place.generation != self._generation:
            self._generation = place.generation
            self._frozen.forget()
        forms = tuple((n, DTYPE_CODES[t.dtype], tuple(t.shape)) for n, t in state.tensors.items())
        if forms == before:
            return Captured(state.skeleton, state.tensors, forms)
        self._frozen.look(named)
        metadata = metadata_of(state, place, seed=self._values.seed) | self._values.metadata()
        return Captured(state.skeleton, state.tensors, forms, metadata)

    def views(
        self, data: memoryview, state: Captured, begins: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Return tensors whose memory is the buffer."""
        named = state.tensors.items()
        if any(tensor.is_cuda for tensor in state.tensors.values()):
            self._pinned.add(data)
        return [view(data, t.dtype, tuple(t.shape), begins[name]) for name, t in named]

    def copy(self, views: Sequence[torch.Tensor], state: Captured) -> None:
        """Copy all tensors in one call: for small tensors each call takes longer than the bytes."""
        self._frozen.copy(id(views), views, state)

    def close(self) -> None:
        """Close the buffers; the agent keeps their contents."""
        self._frozen.forget()
        self._pinned.release()
        super().close()


def load_snapshot(
    channel: Channel, slot: int, named: Mapping[str, Any], state: StateId, *, copy: bool = False
) -> None:
    """Take a state from the agent's memory; `copy` first brings a replica there.

    Raises CheckpointError: it is missing; CorruptError: it has changed since it was sealed.
    """
    with kept(channel, slot, state, copy=copy) as buffer:
        load(named, buffer)


def load(named: Mapping[str, Any], buffer: SnapshotBuffer) -> None:
    """Fill the live objects from the file in the buffer, and verify all bytes that are used.

    Raises CorruptError: it has changed since it was sealed; SessionError: it belongs to another
    model.
    """
    file = buffer.file
    try:
        header = read_header(file)
        begins = {spec.name: header.data_begin + spec.begin for spec in header.specs}
        targets = prepare(named, header.metadata[METADATA_SKELETON].encode())
        filled = [(target, begins[name]) for name, target in targets.items()]
    except Exception:
        buffer.verify()  # a damaged file may raise any error; its damage is then the error
        raise
    copy_verified(buffer, filled)
    finish(named)
