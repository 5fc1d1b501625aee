"""From a sealed snapshot into tensors: verified and copied at once, by two threads.

Each block is copied as soon as its checksum has been computed, while it is in the cache. Nothing
may be used before all are: the seal is over all of them.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from rekindle.protocol.checksum import BLOCK_BYTES, block_of, blocks_of, digest
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.training.torch.state.capture import view

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
