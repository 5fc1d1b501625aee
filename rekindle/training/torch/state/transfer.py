"""Send training state from rank to rank over the default process group, verified by a checksum.

The wire has the length and checksum of the skeleton, the skeleton, the tensors' bytes in pieces,
and their checksum. Small tensors share a piece. A large tensor is sent from its own memory, and
received into its own memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash

from rekindle.errors import CorruptError
from rekindle.training.torch.state.capture import CapturedState, as_bytes, finish, prepare
from rekindle.training.torch.state.in_place import Stateful

_PIECE_BYTES = 8 << 20  # the checksum then finds it in the cache; larger pieces are not faster
_PACKED_BYTES = 1 << 20  # limit of packed tensors; a larger one is faster alone
_UNDER_WAY = 8  # pieces: some are on the wire while others are packed or checked


def send_state(state: CapturedState, to: Sequence[int]) -> None:
    """Send the state to these ranks, which call receive_state(); it must not change in the call.

    Raises RuntimeError, as collectives do: a receiver is lost.
    """
    device = wire_device()
    skeleton = torch.frombuffer(bytearray(state.skeleton), dtype=torch.uint8)
    head = _numbers(skeleton.numel(), xxhash.xxh3_64(state.skeleton))
    for rank in to:
        dist.send(head.to(device), rank)
        dist.send(skeleton.to(device), rank)
    checksum = xxhash.xxh3_64()
    under_way: deque[list[dist.Work | None]] = deque()
    for piece in _pieces(_rows(state.tensors.values(), device)):
        wire = piece[0] if len(piece) == 1 else torch.cat(piece)
        under_way.append([dist.isend(wire, rank) for rank in to])
        _add(checksum, wire)
        if len(under_way) == _UNDER_WAY:
            _wait(under_way.popleft())
    for works in under_way:
        _wait(works)
    for rank in to:
        dist.send(_numbers(checksum).to(device), rank)


def receive_state(named: Mapping[str, Stateful], source: int) -> None:
    """Take over the state that rank `source` sends; live tensors are filled in place.

    Raises CorruptError: the received bytes differ from the sent ones; RuntimeError, as collectives
    do: the sender is lost. After either error the live state belongs to no step.
    """
    device = wire_device()
    length, digest = _receive(2 * 8, source, device).view(torch.int64).tolist()
    skeleton = bytes(_receive(length, source, device).numpy())
    if _signed(xxhash.xxh3_64(skeleton)) != digest:
        raise CorruptError(f"the skeleton of the state from rank {source} is damaged")
    targets = prepare(named, skeleton)
    rows = list(_rows(targets.values(), device))
    found = _receive_rows(rows, source)
    if _receive(8, source, device).view(torch.int64).item() != _signed(found):
        raise CorruptError(f"the state from rank {source} is damaged")
    _put_back(targets.values(), rows)
    finish(named)


def broadcast_tensors(tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Send one rank's elements to all ranks of the default group, and fill the tensors in place."""
    rows = list(_rows(tensors, wire_device()))
    for piece in _pieces(rows):
        wire = piece[0] if len(piece) == 1 else torch.cat(piece)
        dist.broadcast(wire, src=source)
        _unpack(wire, piece)
    _put_back(tensors, rows)


def _receive_rows(rows: Iterable[torch.Tensor], source: int) -> xxhash.xxh3_64:
    """Fill the rows; return the checksum of their new contents."""
    checksum = xxhash.xxh3_64()
    under_way: deque[tuple[dist.Work | None, torch.Tensor, list[torch.Tensor]]] = deque()

    def take() -> None:
        work, wire, piece = under_way.popleft()
        _wait([work])
        _unpack(wire, piece)
        for row in piece:
            _add(checksum, row)

    for piece in _pieces(rows):
        size = sum(row.numel() for row in piece)
        wire = piece[0] if len(piece) == 1 else piece[0].new_empty(size)
        under_way.append((dist.irecv(wire, source), wire, piece))
        if len(under_way) == _UNDER_WAY:
            take()
    while under_way:
        take()
    return checksum


def _rows(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield each tensor's bytes on the wire's device, as views if possible."""
    for tensor in tensors:
        yield as_bytes(tensor.detach().to(device))


def _put_back(tensors: Iterable[torch.Tensor], rows: Iterable[torch.Tensor]) -> None:
    """Copy those rows to the tensors that are not views of them."""
    for tensor, row in zip(tensors, rows, strict=True):
        if row.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(row.view(tensor.dtype).view(tensor.shape))


def _pieces(rows: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the rows as they are sent, in an order that follows only from their lengths."""
    small: list[torch.Tensor] = []
    size = 0
    for row in rows:
        if row.numel() > _PACKED_BYTES:
            yield from ([part] for part in row.split(_PIECE_BYTES))
        elif row.numel():
            if size + row.numel() > _PACKED_BYTES:
                yield small
                small, size = [], 0
            small.append(row)
            size += row.numel()
    if small:
        yield small


def _unpack(wire: torch.Tensor, piece: list[torch.Tensor]) -> None:
    if wire is not piece[0]:
        for part, row in zip(wire.split([row.numel() for row in piece]), piece, strict=True):
            row.copy_(part)


def _receive(count: int, source: int, device: torch.device) -> torch.Tensor:
    row = torch.empty(count, dtype=torch.uint8, device=device)
    dist.recv(row, source)
    return row.cpu()


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # None: this rank is not in the group
        work.wait()


def _add(checksum: xxhash.xxh3_64, row: torch.Tensor) -> None:
    checksum.update(row.cpu().numpy().data)


def _signed(checksum: xxhash.xxh3_64) -> int:
    return int.from_bytes(checksum.digest(), "big", signed=True)


def _numbers(*values: int | xxhash.xxh3_64) -> torch.Tensor:
    plain = [v if isinstance(v, int) else _signed(v) for v in values]
    return torch.tensor(plain, dtype=torch.int64).view(torch.uint8)


def wire_device() -> torch.device:
    """Return the CPU if the group's backend supports it (gloo), otherwise the accelerator."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
