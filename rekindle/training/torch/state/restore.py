"""Where a rank's state comes from, as the plan of a generation says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from rekindle import names
from rekindle.rank.channel import Channel
from rekindle.rank.rank_place import Place
from rekindle.recovery.policy.plan import Made, RankPlan, Source
from rekindle.training.torch.groups.ddp import broadcast_module_state
from rekindle.training.torch.state.checkpoint import load_checkpoint
from rekindle.training.torch.state.snapshot import load_snapshot
from rekindle.training.torch.state.transfer import receive_state


def fetch_state(
    plan: RankPlan,
    made: Made,
    *,
    place: Place,
    named: Mapping[str, Any],
    channel: Channel,
    fresh: torch.nn.Module | None,
) -> None:
    """Bring the live objects to a state.

    fresh: the module that all ranks have to begin with as rank 0 has built it.
    Raises CheckpointError or CorruptError: the source has not what the plan expects of it.
    """
    match plan.source:
        case Source.PEER:
            receive_state(named, plan.peer)
        case Source.SNAPSHOT:
            load_snapshot(channel, place.slot, named, made)
        case Source.NEIGHBOUR:
            load_snapshot(channel, place.slot, named, made, copy=True)
        case Source.CHECKPOINT:
            load_checkpoint(os.environ[names.ENV_CHECKPOINT_STORE], named, made, place)
        case Source.FRESH if fresh is not None:
            broadcast_module_state(fresh)
