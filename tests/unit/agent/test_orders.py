"""The orders of the coordinator: each has a handler, and a generation affects some snapshots."""

import asyncio
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from jobs.driver import spec_of

from rekindle.agent.node_state import NodeState
from rekindle.agent.rank_process import with_local_progress
from rekindle.agent.ranks import RankSupervisor
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import HeartbeatPage

# `Agent._listen`, `Agent._handle_orders` and `RankSupervisor.handle` take these by name.
BY_HAND = {p.EndAgent, p.Welcome, p.Promote, p.Prepare, p.Spawn, p.HostStore, *p.CheckOrder}


def test_each_order_has_a_handler() -> None:
    """The table of orders and the separately handled orders are all messages to an agent."""
    snapshots: Any = SimpleNamespace(write_final_checkpoint=print, write_parts=print, commit=print)
    ranks = RankSupervisor(spec_of(nodes=1, processes=1), snapshots, print, {}, NodeState(1))
    assert set(ranks._orders) | BY_HAND == set(get_args(p.ToAgent))


SUSPICIONS = ((1, 7),)


@pytest.mark.parametrize(
    ("shard", "shards", "suspicions", "former", "expected"),
    [
        (None, 1, (), None, []),
        (None, 1, SUSPICIONS, None, ["formed"]),
        (None, 1, (), p.ReplicaAddress(host="there", port=1), ["break off"]),
        (0, 1, (), None, ["break off"]),
        (0, 2, (), None, ["formed", "break off"]),
    ],
    ids=["the whole state", "a suspicion", "a moved node", "one shard", "two shards"],
)
def test_a_generation_concerns_shards_and_suspicious_snapshots(
    shard: int | None, shards: int, suspicions: Any, former: Any, expected: list[str]
) -> None:
    """A new generation affects the snapshots if there are several shards or suspicious snapshots.

    Its end affects only shards, and nodes that have moved: only they have transfers.
    """
    calls: list[str] = []
    snapshots: Any = SimpleNamespace(
        write_final_checkpoint=print,
        write_parts=print,
        commit=print,
        formed=lambda form: calls.append("formed"),
        break_off=lambda: calls.append("break off"),
        own=SimpleNamespace(former=None),
    )
    ranks = RankSupervisor(spec_of(nodes=1, processes=1), snapshots, print, {}, NodeState(1))
    nobody: Any = None
    ranks._on_message(nobody, p.Arrived(rank=0, generation=0, shard=shard))
    form = p.FormGeneration(
        generation=1,
        world_size=1,
        store_host="",
        store_port=1,
        step=0,
        shards=shards,
        suspicions=suspicions,
        former=former,
        ranks={0: 0},
        plan={},
    )
    asyncio.run(ranks.handle(form))
    asyncio.run(ranks.handle(p.GenerationEnded(generation=1)))
    assert calls == expected


@pytest.mark.parametrize(
    ("pages", "known", "finished"),
    [
        ([], 4, 4),
        ([(None, False)], 0, 0),
        ([(None, True)], 0, 1),
        ([(3, False), (5, False)], 4, 5),
        ([(5, True), (5, False)], 4, 6),
        ([(3, True)], 7, 7),
    ],
    ids=["no rank", "no step", "first update", "a step", "an update", "the order knows more"],
)
def test_the_end_of_a_generation_with_local_progress(
    pages: list[tuple[int | None, bool]], known: int, finished: int
) -> None:
    """The agent raises the number of steps in the order to what its ranks' pages show.

    A step whose update has begun counts, because it can still end.
    """
    order = p.GenerationEnded(generation=3, finished=known, process_lost=True)
    result = with_local_progress(order, [page_of(*each) for each in pages])
    assert result == p.GenerationEnded(generation=3, finished=finished, process_lost=True)


def page_of(finished: int | None, in_update: bool) -> HeartbeatPage:
    """Return the heartbeat page of a rank."""
    page = HeartbeatPage()
    if finished is not None:
        page.beat(finished)
    if in_update:
        page.begin_update()
    return page
