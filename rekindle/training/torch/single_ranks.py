"""Find the state that a rank shares with no other, and the state that all ranks should share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle import names
from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.progress import RankPlace
from rekindle.training.torch.arguments import Arguments
from rekindle.training.torch.state.own_state import OwnState
from rekindle.training.torch.state.script_variables import Variables
from rekindle.training.torch.state.statistics import (
    REMEDY,
    STATISTICS,
    Found,
    OtherBuffers,
    Statistics,
)


def own_state_of(
    given: Arguments,
    statistics: Found,
    variables: Variables,
    *,
    channel: Channel | None,
    place: RankPlace,
) -> OwnState | None:
    """Return the state that this rank shares with no other; None: there is none.

    A rank with a shard of its own, or without peers, keeps all its state in its own snapshots.
    Raises SessionError: the world may shrink, so a rank may have no copy of its own state.
    """
    slot, ranks = rank_environment.slot_of_world()
    alone, modules = given.of_one_rank(), statistics.alone
    things = {**alone, STATISTICS: Statistics(modules)} if modules else dict(alone)
    if channel is None or ranks == 1:
        return None
    shrinks = rank_environment.number(names.ENV_SHRINKS) == 1
    if not things:
        if shrinks or place.shard is not None or not given.may_have_epochs:
            return None
        kept = {"variables": variables}
        return OwnState(kept, channel=channel, slot=slot, ranks=ranks, of_steps=False)
    if shrinks:
        what = f"per_rank: {', '.join(alone)}" if alone else STATISTICS
        remedy = "or keep them in extra" if alone else REMEDY
        raise SessionError(
            f"{what}: the world may shrink (--nnodes MIN:MAX), and a node that joins has no "
            f"copy of them; give a fixed --nnodes, {remedy}"
        )
    if place.shard is not None:
        return None
    if slot == 0 and rank_environment.is_first_start():
        every = rank_environment.number(names.ENV_SNAPSHOT_EVERY)
        say(
            f"each rank has a state of its own: {', '.join(things)}. After the loss of a node, "
            "or a fault after the last collective of a step, all ranks "
            + (
                f"return to the newest snapshot, and repeat at most {every} steps"
                if every
                else "begin again, because this job takes no snapshots: give --snapshot-every"
            )
        )
    return OwnState(things, channel=channel, slot=slot, ranks=ranks)


def check_shards(given: Arguments, statistics: Found, place: RankPlace, world_size: int) -> None:
    """Raise SessionError: ranks with the same shard would take each other's own state."""
    if place.shard is None or place.shards >= world_size:
        return
    if declared := ", ".join(given.per_rank):
        raise SessionError(
            f"per_rank: {declared} of a rank would come from another rank with the same shard; "
            "give each rank a shard of its own, or keep them in extra"
        )
    if statistics.shared or statistics.alone:
        raise SessionError(
            f"{STATISTICS}: those of a rank would come from another rank with the same shard; "
            "use SyncBatchNorm, or give ignore=[model] if a rank may take those of another one"
        )


def replicated(
    given: Arguments, named: Mapping[str, Any], statistics: Found, place: RankPlace
) -> dict[str, Any]:
    """Return the objects that should be the same on all ranks, by name."""
    alone = set(map(id, statistics.alone))
    found = {
        name: named[name]
        for name, thing in given.extra.items()
        if not (isinstance(thing, torch.nn.Module) and alone & set(map(id, thing.modules())))
    }
    buffers = OtherBuffers(named["model"], given.known)
    has_some = place.shard is None and buffers.state_dict()
    return {**found, "the model's buffers": buffers} if has_some else found
