"""Sharded checkpoints: the store writes one, the newest waits, all shards have the same step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.coordinator.machine.checkpoints import CheckpointBacklog
from rekindle.protocol.agent import ShardReady


def due(backlog: CheckpointBacklog, step: int, shard: int, of: int = 2) -> tuple[int, int] | None:
    part = ShardReady(step=step, generation=1, rank=shard, shard=shard, shards=of)
    return backlog.add(shard, part)


def all_due(backlog: CheckpointBacklog, step: int) -> tuple[int, int] | None:
    due(backlog, step, 0)
    return due(backlog, step, 1)


def test_written_once_all_shards_are_ready() -> None:
    """A checkpoint starts when all shards of its step are ready.

    Each node writes its own shards.
    """
    backlog = CheckpointBacklog()
    due(backlog, 5, 1)
    assert backlog.next() is None
    due(backlog, 5, 0)
    ready = backlog.next()
    assert ready is not None
    assert (ready.state, ready.shards_by_node()) == ((5, 1), {0: {0: 0}, 1: {1: 1}})
    assert backlog.next() is None
    assert not backlog.is_empty
    assert not backlog.done((4, 1))
    assert backlog.done((5, 1))
    assert backlog.is_empty


def test_the_newest_waits() -> None:
    """A newer step replaces the step that waits. A step that is not due on all ranks is dropped."""
    backlog = CheckpointBacklog()
    all_due(backlog, 5)
    assert backlog.next()
    assert all_due(backlog, 10) is None
    due(backlog, 12, 0)
    assert all_due(backlog, 15) == (10, 1)
    due(backlog, 12, 1)
    due(backlog, 10, 0)
    assert backlog.next() is None
    backlog.done((5, 1))
    ready = backlog.next()
    assert ready is not None
    assert ready.state == (15, 1)


def test_a_generation_begins_with_nothing() -> None:
    """A new generation starts with an empty backlog, and lower steps count again."""
    backlog = CheckpointBacklog()
    all_due(backlog, 10)
    assert backlog.next()
    all_due(backlog, 15)
    due(backlog, 20, 0)
    backlog.begin()
    assert backlog.is_empty
    due(backlog, 20, 1)
    assert backlog.next() is None
    assert all_due(backlog, 5) is None
    assert backlog.next() is not None


events = st.lists(st.one_of(st.integers(0, 3), st.sampled_from(["next", "done"])), max_size=60)


@given(events)
def test_any_order(order: list[object]) -> None:
    """In any order, each complete step is written, left out or waits, exactly once."""
    backlog, steps = CheckpointBacklog(), dict.fromkeys(range(4), 0)
    done: list[int] = []
    left_out: list[int] = []
    for event in order:
        if event == "next":
            if (ready := backlog.next()) is not None:
                assert sorted(ready.places) == [0, 1, 2, 3]
                done.append(ready.state[0])
        elif event == "done":
            if backlog.under_way is not None:
                assert backlog.done(backlog.under_way)
        else:
            assert isinstance(event, int)
            steps[event] += 1
            left = due(backlog, steps[event], event, of=4)
            left_out += [left[0]] if left else []
    assert len({*done, *left_out}) == len(done) + len(left_out)
    complete = min(steps.values())
    assert len(done) + len(left_out) in (complete, complete - 1)
    assert done == sorted(done)
