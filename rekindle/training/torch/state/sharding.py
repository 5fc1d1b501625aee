"""Which piece of which whole tensor a rank holds, and what it holds where it is cut otherwise."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from rekindle.checkpoints.format import METADATA_ORIGIN, Header
from rekindle.checkpoints.manifest import ShardLayout, StateOrigin
from rekindle.checkpoints.resharding import Box, box_at, whole
from rekindle.errors import CorruptError, SessionError
from rekindle.rank.held_state import RankPlace
from rekindle.training.torch import private
from rekindle.training.torch.state.capture import CapturedState, Stateful
from rekindle.training.torch.state.skeleton import Node, Reader, TensorSpec, stride_of

METADATA_PIECES = "pieces"  # by tensor that is a piece of another: the whole's shape, and where

_TOLD = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
_VERSIONS = {"torch": str(torch.__version__), "python": platform.python_version()}


class Piece(NamedTuple):
    """A box of a whole tensor of this shape."""

    shape: tuple[int, ...]
    box: Box


def all_of(shape: Sequence[int]) -> Piece:
    """A tensor that is whole."""
    return Piece(tuple(shape), whole(shape))


def piece_of(tensor: Any) -> Piece | None:
    """The piece of a DTensor that lies on this rank; None: its placements are no plain cuts."""
    from torch.distributed.tensor import Replicate, Shard

    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return None
    local, offset = private.local_shape_and_offset(tensor)
    box = box_at(offset, local)
    fits = box.shape == tuple(tensor.to_local().shape)
    return Piece(tuple(tensor.shape), box) if fits else None


def metadata_of(state: CapturedState, place: RankPlace, *, seed: int) -> dict[str, str]:
    """What a rank's file says of the state, as long as that has this shape.

    Where others than a mesh tell what the pieces are, or where one is no plain cut, none is told:
    such a state can be taken over only by as many ranks, cut up in the same way.
    """
    origin = StateOrigin(
        versions=_VERSIONS,
        layout=ShardLayout(shards=place.shards, mesh=dict(place.mesh or {})),
        rng={
            "seed": seed,
            "streams": "rekindle.training.torch.data.random_streams: of seed, rank and step",
        },
    )
    said = {METADATA_ORIGIN: msgspec.json.encode(origin).decode()}
    pieces = {name: piece_of(tensor) for name, tensor in state.distributed.items()}
    told = {name: (p.shape, p.box.begin) for name, p in pieces.items() if p is not None}
    if place.mesh is not None and len(told) == len(pieces):
        said[METADATA_PIECES] = msgspec.json.encode(told).decode()
    return said


def pieces_in(header: Header) -> dict[str, Piece]:
    """The pieces that a file says it holds, by tensor; the others are whole.

    Raises CorruptError: what it says cannot be.
    """
    try:
        told = msgspec.json.decode(header.metadata.get(METADATA_PIECES, "{}"), type=_TOLD)
        pieces = {spec.name: all_of(spec.shape) for spec in header.specs}
        for spec in header.specs:
            if spec.name in told:
                shape, offset = told[spec.name]
                pieces[spec.name] = Piece(shape, box_at(offset, spec.shape))
        return pieces
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptError(f"what the file says of its pieces cannot be: {error}") from error


class Refit:
    """Changes a skeleton to what live objects hold, whose tensors may be cut up otherwise.

    pieces: what the tensors are that the skeleton tells of. again: whether they can be cut anew.
    wanted: by the tensors' names, the pieces that are to be loaded; filled by skeleton().
    """

    def __init__(self, pieces: Mapping[str, Piece], *, again: bool) -> None:
        self._pieces = pieces
        self._uncut = all(piece == all_of(piece.shape) for piece in pieces.values())
        self._again = again
        self.wanted: dict[str, Piece] = {}

    def skeleton(self, named: Mapping[str, Stateful], skeleton: bytes) -> bytes:
        """Raises SessionError: the state is of another model, or of a kind that cannot be cut."""
        tree = msgspec.json.decode(skeleton)
        return msgspec.json.encode(
            {
                name: self._node(node, _like(named[name]) if name in named else None, name)
                for name, node in tree.items()
            }
        )

    def _node(self, node: Node, live: Any, path: str) -> Node:
        """The node for what is in the place of the live object, as far as there is one."""
        if isinstance(node, list):
            return self._list(node, live, path)
        if not isinstance(node, dict):
            return node
        [(kind, body)] = node.items()
        if kind in ("tensor", "shard"):
            return self._tensor(kind, TensorSpec(*body), live, path)
        if kind == "tuple":
            return {kind: self._list(body, live, path)}
        if not isinstance(body, list) or kind == "numpy":
            return node
        return {kind: [self._pair(key, value, live, path) for key, value in body]}

    def _pair(self, key: Node, value: Node, live: Any, path: str) -> list[Node]:
        name = Reader({}).decode(key)
        if isinstance(live, Mapping):
            live = live.get(name)
        elif not isinstance(live, torch.Tensor):  # a parameter stands for all that is kept of it
            live = None
        return [key, self._node(value, live, f"{path}.{name}")]

    def _list(self, nodes: list[Node], live: Any, path: str) -> list[Node]:
        inner = list(live) if isinstance(live, list | tuple) else []
        inner += [None] * (len(nodes) - len(inner))
        return [
            self._node(each, inner[number], f"{path}.{number}") for number, each in enumerate(nodes)
        ]

    def _tensor(self, kind: str, spec: TensorSpec, live: Any, path: str) -> Node:
        there = self._pieces[spec.name]
        mine = self._mine(kind, there, live, path)
        if mine is None:
            self.wanted[spec.name] = there
            return {kind: [*spec]}
        if mine.shape != there.shape:
            raise SessionError(
                f"the state is of another model: {path} has shape {list(there.shape)} in it, "
                f"{list(mine.shape)} here"
            )
        self.wanted[spec.name] = mine
        kind = "shard" if hasattr(live, "device_mesh") else "tensor"
        stride = spec.stride
        if mine.box != there.box:
            stride = stride_of(live.to_local() if kind == "shard" else live)
        return {kind: [spec.name, spec.code, list(mine.box.shape), spec.device, stride]}

    def _mine(self, kind: str, there: Piece, live: Any, path: str) -> Piece | None:
        """The piece that belongs in the live tensor's place; None: what is there, as it is."""
        distributed = hasattr(live, "device_mesh")
        if kind == "tensor" and not (distributed and self._uncut):
            return None
        if isinstance(live, torch.Tensor):
            mine = piece_of(live) if distributed else all_of(live.shape)
            if mine is not None and (kind == "shard" or mine.shape == there.shape):
                return mine
        if kind == "shard" and self._again:
            raise SessionError(
                f"{path}: how this tensor is cut up here cannot be told, so its pieces cannot be "
                "put together anew: resume the job with as many ranks and the same sharding"
            )
        return None


def _like(thing: Stateful) -> Any:
    """What the state of an object is cut up like; of an optimizer, as its parameters are."""
    plain = torch.optim.Optimizer.load_state_dict
    if isinstance(thing, torch.optim.Optimizer) and type(thing).load_state_dict is plain:
        parameters = [p for group in thing.param_groups for p in group["params"]]
        return {"state": dict(enumerate(parameters))}
    return thing.state_dict()
