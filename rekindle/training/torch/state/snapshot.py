"""A PyTorch rank's state into its agent's memory, and back from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rekindle.checkpoints.format import read_header
from rekindle.protocol.snapshot_buffer import SnapshotBuffer
from rekindle.rank.channel import Channel
from rekindle.rank.rank_place import Place
from rekindle.rank.snapshot_writer import METADATA_SKELETON, Captured, SnapshotWriter, kept
from rekindle.recovery.policy.plan import Made
from rekindle.training.torch.state.capture import DTYPE_CODES, capture, finish, prepare, view
from rekindle.training.torch.state.sharding import metadata_of
from rekindle.training.torch.state.verified_copy import copy_verified


class TorchSnapshotWriter(SnapshotWriter):
    """Copies live tensors. seed: of the random streams, for whoever reads a checkpoint."""

    def __init__(self, channel: Channel, place: Place, *, seed: int) -> None:
        super().__init__(channel, place)
        self._seed = seed

    def capture(self, named: Mapping[str, Any], place: Place, *, before: object) -> Captured:
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
        torch._foreach_copy_(list(views), list(state.tensors.values()))


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
