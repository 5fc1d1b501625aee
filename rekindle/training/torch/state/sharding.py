"""Describe the file of a rank: the pieces of tensors in it, and the values of its script.

Another job may have divided the tensors otherwise. A resumed run keeps the hyperparameters of the
state, and takes its own seed and world size.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from rekindle.checkpoints.format import METADATA_ORIGIN, Header
from rekindle.checkpoints.manifest import ShardLayout, StateOrigin
from rekindle.checkpoints.resharding import Box, box_at, whole
from rekindle.errors import CorruptError, SessionError
from rekindle.rank.progress import RankPlace
from rekindle.training.sampler import StepSampler
from rekindle.training.torch import private
from rekindle.training.torch.state.capture import CapturedState
from rekindle.training.torch.state.in_place import Stateful, state_of
from rekindle.training.torch.state.nodes import Node
from rekindle.training.torch.state.skeleton import MAPPINGS, Reader, TensorSpec, stride_of

METADATA_VALUES = "given_values"  # in the header of a rank's file, since Rekindle compares them

_Groups = list[dict[str, Any]]
METADATA_PIECES = "pieces"  # by name of a piece: the full shape, and the offset in it

_PIECES = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
_VERSIONS = {"torch": str(torch.__version__), "python": platform.python_version()}


class Piece(NamedTuple):
    """A box in a complete tensor of this shape."""

    shape: tuple[int, ...]
    box: Box


def all_of(shape: Sequence[int]) -> Piece:
    """Return the piece that is the complete tensor."""
    return Piece(tuple(shape), whole(shape))


def piece_of(tensor: Any) -> Piece | None:
    """Return this rank's piece of a DTensor; None: its placements are not simple divisions."""
    from torch.distributed.tensor import Replicate, Shard

    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return None
    local, offset = private.local_shape_and_offset(tensor)
    box = box_at(offset, local)
    fits = box.shape == tuple(tensor.to_local().shape)
    return Piece(tuple(tensor.shape), box) if fits else None


def metadata_of(state: CapturedState, place: RankPlace, *, seed: int) -> dict[str, str]:
    """Return the metadata in a rank's file, which stay the same while the state has this shape.

    The pieces are listed only if a mesh defines them and all are simple divisions. Otherwise only
    the same number of ranks with the same sharding can take over the state.
    """
    origin = StateOrigin(
        versions=_VERSIONS,
        layout=ShardLayout(shards=place.shards, mesh=dict(place.mesh or {})),
        rng={
            "seed": seed,
            "streams": "rekindle.training.torch.data.random_streams: of seed, rank and step",
        },
    )
    metadata = {METADATA_ORIGIN: msgspec.json.encode(origin).decode()}
    pieces = {name: piece_of(tensor) for name, tensor in state.distributed.items()}
    described = {name: (p.shape, p.box.begin) for name, p in pieces.items() if p is not None}
    if place.mesh is not None and len(described) == len(pieces):
        metadata[METADATA_PIECES] = msgspec.json.encode(described).decode()
    return metadata


def pieces_in(header: Header) -> dict[str, Piece]:
    """Return the pieces in a file, by tensor; tensors that the file does not list are complete.

    Raises CorruptError: the file's description of its pieces is invalid.
    """
    try:
        described = msgspec.json.decode(header.metadata.get(METADATA_PIECES, "{}"), type=_PIECES)
        pieces = {spec.name: all_of(spec.shape) for spec in header.specs}
        for spec in header.specs:
            if spec.name in described:
                shape, offset = described[spec.name]
                pieces[spec.name] = Piece(shape, box_at(offset, spec.shape))
        return pieces
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptError(f"the file has invalid metadata of its pieces: {error}") from error


class Refit:
    """Changes a skeleton to the shards of live objects, which may be divided in another way.

    pieces: the pieces of the skeleton's tensors. again: whether they can be divided again.
    wanted: the pieces to load, by the tensors' names; skeleton() fills it.
    """

    def __init__(self, pieces: Mapping[str, Piece], *, again: bool) -> None:
        self._pieces = pieces
        self._uncut = all(piece == all_of(piece.shape) for piece in pieces.values())
        self._again = again
        self.wanted: dict[str, Piece] = {}

    def skeleton(self, named: Mapping[str, Stateful], skeleton: bytes) -> bytes:
        """Return the changed skeleton. Raises SessionError: another model, or not divisible."""
        tree = msgspec.json.decode(skeleton)
        return msgspec.json.encode(
            {
                name: self._node(node, _like(named[name]) if name in named else None, name)
                for name, node in tree.items()
            }
        )

    def _node(self, node: Node, live: Any, path: str) -> Node:
        """Return the node for the live object at this place, if there is one."""
        if isinstance(node, list):
            return self._list(node, live, path)
        if not isinstance(node, dict):
            return node
        [(kind, body)] = node.items()
        if kind in ("tensor", "shard"):
            return self._tensor(kind, TensorSpec(*body), live, path)
        if kind == "tuple":
            return {kind: self._list(body, live, path)}
        if kind in MAPPINGS:
            return {kind: [self._pair(key, value, live, path) for key, value in body]}
        return {kind: self._node(body, None, path)}

    def _pair(self, key: Node, value: Node, live: Any, path: str) -> list[Node]:
        name = Reader({}).decode(key)
        if isinstance(live, Mapping):
            live = live.get(name)
        elif not isinstance(live, torch.Tensor):  # a parameter stands for its values
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
                f"the state belongs to another model: {path} has shape {list(there.shape)} in "
                f"the state, but {list(mine.shape)} in this model"
            )
        self.wanted[spec.name] = mine
        kind = "shard" if hasattr(live, "device_mesh") else "tensor"
        stride = spec.stride
        if mine.box != there.box:
            stride = stride_of(live.to_local() if kind == "shard" else live)
        return {kind: [spec.name, spec.code, list(mine.box.shape), spec.device, stride]}

    def _mine(self, kind: str, there: Piece, live: Any, path: str) -> Piece | None:
        """Return the piece for the live tensor; None: the piece in the file stays as it is."""
        distributed = hasattr(live, "device_mesh")
        if kind == "tensor" and not (distributed and self._uncut):
            return None
        if isinstance(live, torch.Tensor):
            mine = piece_of(live) if distributed else all_of(live.shape)
            if mine is not None and (kind == "shard" or mine.shape == there.shape):
                return mine
        if kind == "shard" and self._again:
            raise SessionError(
                f"Rekindle cannot read how the tensor {path} is sharded, so it cannot reshard "
                "it. Resume the job with the same number of ranks and the same sharding"
            )
        return None


def _like(thing: Stateful) -> Any:
    """Return live values with the sharding of an object's state: an optimizer's parameters."""
    plain = torch.optim.Optimizer.load_state_dict
    if isinstance(thing, torch.optim.Optimizer) and type(thing).load_state_dict is plain:
        parameters = [p for group in thing.param_groups for p in group["params"]]
        return {"state": dict(enumerate(parameters))}
    return state_of(thing)


class GivenValues(msgspec.Struct, frozen=True):
    """The values of one script.

    ranks: the full world size. batch_size: samples of a rank in a step; None without a sampler.
    optimizers: the hyperparameters of each group as the script has built them, by name.
    """

    seed: int = 0
    ranks: int = 1
    batch_size: int | None = None
    optimizers: dict[str, _Groups] = {}

    def metadata(self) -> dict[str, str]:
        """Return the entry in the header of a file."""
        return {METADATA_VALUES: msgspec.json.encode(self).decode()}

    def in_force(self, former: GivenValues) -> GivenValues:
        """Return the values after a load: the hyperparameters are those of the state."""
        return msgspec.structs.replace(self, optimizers=former.optimizers)

    def differences(self, former: GivenValues) -> Iterator[str]:
        """Yield a sentence for each difference. former: the values of the state."""
        for name, groups in self.optimizers.items():
            for number, (now, then) in enumerate(
                zip(groups, former.optimizers.get(name, []), strict=False)
            ):
                changed = [key for key in now if key in then and now[key] != then[key]]
                if changed:
                    kept = ", ".join(f"{key}={then[key]}" for key in changed)
                    given = ", ".join(f"{key}={now[key]}" for key in changed)
                    yield (
                        f"{name}.param_groups[{number}] keeps the values of the state, which began "
                        f"with {kept}; the script gives {given}. To change them, set them in the "
                        "group after entering the Session"
                    )
        if self.seed != former.seed:
            yield (
                f"the seed is {self.seed}, and was {former.seed} before: later steps draw other "
                "random numbers than a run with one seed"
            )
        if (self.ranks, self.batch_size) != (former.ranks, former.batch_size):
            yield (
                f"the world has {_samples(self)}, and had {_samples(former)} before: later steps "
                "have other samples and random numbers than a run with one size"
            )


def _samples(values: GivenValues) -> str:
    ranks = f"{values.ranks} rank{'s' * (values.ranks != 1)}"
    return ranks if values.batch_size is None else f"{ranks} with {values.batch_size} samples each"


def values_of(
    named: Mapping[str, Any], sampler: StepSampler | None, *, seed: int, ranks: int
) -> GivenValues:
    """Return the values of a script. named: the objects that its Session keeps."""
    optimizers = {
        name: [
            {key: _plain(value) for key, value in group.items() if _is_plain(value)}
            for group in thing.param_groups
        ]
        for name, thing in named.items()
        if isinstance(thing, torch.optim.Optimizer)
    }
    size = None if sampler is None else sampler.batch_size
    return GivenValues(seed, ranks, size, optimizers)


def values_in(header: Header) -> GivenValues | None:
    """Return the values in the header of a file; None: an earlier version of Rekindle wrote it.

    Raises CorruptError: the entry is damaged.
    """
    text = header.metadata.get(METADATA_VALUES)
    try:
        return None if text is None else msgspec.json.decode(text, type=GivenValues)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptError(f"the file has invalid values of its script: {error}") from error


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta
    many = isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value)
    return many or value is None or isinstance(value, int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
