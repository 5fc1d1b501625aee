"""The plan: newest step that any intact copy holds, and nothing of a torn rank."""

from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.plan import Holding, RankPlan, Source, make_plan

steps = st.none() | st.integers(0, 6)
kept = st.lists(st.integers(0, 6), max_size=3).map(tuple)
holdings = st.lists(
    st.builds(
        Holding,
        node=st.integers(0, 2),
        finished=steps,
        torn=st.booleans(),
        snapshots=kept,
        checkpoints=kept,
    ),
    min_size=1,
    max_size=8,
).map(lambda found: dict(enumerate(found)))


def live(held: dict[int, Holding]) -> list[int]:
    return [h.finished for h in held.values() if h.finished is not None and not h.torn]


@given(holdings)
def test_live_state_wins_and_the_newest_of_it(held: dict[int, Holding]) -> None:
    """If any intact rank lives, all go on from the newest step one of them has finished."""
    if live(held):
        assert make_plan(held).step == max(live(held))


@given(holdings)
def test_every_rank_gets_the_planned_step(held: dict[int, Holding]) -> None:
    """No step is mixed: each source holds exactly the planned step, and no sender is torn."""
    plan = make_plan(held)
    for rank, own in enumerate(plan.ranks):
        giver = held[rank] if own.source is not Source.PEER else None
        match own.source:
            case Source.SELF:
                assert giver is not None
                assert giver.finished == plan.step
                assert not giver.torn
            case Source.SNAPSHOT:
                assert giver is not None
                assert plan.step in giver.snapshots
            case Source.CHECKPOINT:
                assert giver is not None
                assert plan.step in giver.checkpoints
            case Source.PEER:
                assert rank in plan.ranks[own.peer].sends_to
                assert plan.ranks[own.peer].source is not Source.PEER
            case Source.FRESH:
                assert plan.step == 0


@given(holdings)
def test_who_sends_is_who_is_expected_to(held: dict[int, Holding]) -> None:
    """Senders and receivers agree, so no transfer waits for ever."""
    plan = make_plan(held)
    sends = {(r, to) for r, own in enumerate(plan.ranks) for to in own.sends_to}
    receives = {(own.peer, r) for r, own in enumerate(plan.ranks) if own.source is Source.PEER}
    assert sends == receives


@given(holdings)
def test_without_live_state_the_newest_copy_wins(held: dict[int, Holding]) -> None:
    """Snapshot or checkpoint, whichever is newer; fresh only if there is neither."""
    copies = [s for h in held.values() for s in (*h.snapshots, *h.checkpoints)]
    plan = make_plan(held)
    if not live(held):
        assert plan.step == max(copies, default=0)
        fresh = {own.source for own in plan.ranks} == {Source.FRESH}
        assert fresh == (not copies)


def test_one_dead_rank_of_four_costs_one_transfer() -> None:
    """Three survivors keep their state; the replacement gets its from a rank of its own node."""
    held = {r: Holding(node=r // 2, finished=7) for r in range(4)}
    held[3] = Holding(node=1)
    plan = make_plan(held)
    assert [own.source for own in plan.ranks].count(Source.SELF) == 3
    assert plan.ranks[3].peer == 2


def test_of_equals_the_snapshot() -> None:
    """A checkpoint of the same step is farther away; a newer one is worth the way."""
    held = {0: Holding(node=0, snapshots=(4, 6), checkpoints=(6, 2)), 1: Holding(node=1)}
    plan = make_plan(held)
    assert (plan.step, plan.ranks[0].source) == (6, Source.SNAPSHOT)
    held[1] = Holding(node=1, checkpoints=(8,))
    plan = make_plan(held)
    assert (plan.step, plan.ranks[1].source) == (8, Source.CHECKPOINT)
    assert plan.ranks[0] == RankPlan(source=Source.PEER, peer=1)
