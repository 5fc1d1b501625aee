"""Exchange a few bytes of each rank with all ranks in each step, in one collective."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rekindle.errors import SessionError
from rekindle.training.torch.state.capture import as_bytes
from rekindle.training.torch.state.nodes import LiveParts
from rekindle.training.torch.state.skeleton import Reader, Writer, tensor_specs
from rekindle.training.torch.state.transfer import wire_device

_HEAD = 8  # bytes that hold the length
_ROOM = 56  # bytes for the first messages


class Sharing:
    """Exchanges bytes in one generation; each rank creates one object for each generation.

    An exchange usually takes one all-gather. A second one follows when a rank has a longer message
    than the room for it.
    """

    def __init__(self) -> None:
        self._room = _ROOM

    def all_gather(self, words: bytes) -> list[bytes]:
        """Return each rank's bytes, in the order of the ranks; a collective.

        Raises RuntimeError, as collectives do: a rank is lost.
        """
        if not dist.is_initialized():  # one process, without an agent
            return [words]
        rows = self._gather(words)
        longest = max(length for length, _ in rows)
        if longest > self._room:
            self._room = 2 * longest  # the same on all ranks
            rows = self._gather(words)
        return [row[:length] for length, row in rows]

    def _gather(self, words: bytes) -> list[tuple[int, bytes]]:
        fits = words[: self._room].ljust(self._room, b"\0")
        row = torch.frombuffer(
            bytearray(len(words).to_bytes(_HEAD, "little") + fits), dtype=torch.uint8
        ).to(wire_device())
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        data, width = torch.stack(rows).cpu().numpy().tobytes(), len(row)
        texts = (data[begin : begin + width] for begin in range(0, len(data), width))
        return [(int.from_bytes(text[:_HEAD], "little"), text[_HEAD:]) for text in texts]


def pack(value: Any, path: str) -> bytes:
    """Return a state as bytes, including its tensors.

    Raises SessionError: a state cannot hold one of its values. The text names the place below
    `path`.
    """
    writer = Writer()
    node = writer.encode(value, path)
    rows = {name: as_bytes(each.cpu()).numpy().tobytes() for name, each in writer.tensors.items()}
    try:
        return msgspec.msgpack.encode((node, rows))
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - 20) : error.end + 20]
        raise SessionError(f"{path} have {text!r}, which UTF-8 cannot encode") from None


def unpack(words: bytes) -> Any:
    """Return the state from packed bytes."""
    node, rows = msgspec.msgpack.decode(words)
    tensors = {spec.name: spec.make() for spec in tensor_specs(node)}
    for name, row in rows.items():
        if row:
            filled = torch.frombuffer(bytearray(row), dtype=torch.uint8)
            target = tensors[name]
            target.copy_(filled.view(target.dtype).view(target.shape))
    return Reader(tensors, LiveParts()).decode(node)
