"""Retention removes checkpoints that no rule keeps, and never a checkpoint in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.checkpoints.retention import Kept, Retention, superfluous
from rekindle.states import StateId

NOW = 1_000_000.0


def kept(step: int, generation: int = 1, *, hours: float = 0.0, **metrics: float) -> Kept:
    return Kept(StateId(step, generation), NOW - hours * 3600, metrics)


def gone(finished: list[Kept], in_use: tuple[StateId, ...] = (), **rules: object) -> list[StateId]:
    """Return the keys that may be removed if every checkpoint is valid."""
    keys = sorted((each.key for each in finished), reverse=True)
    retention = Retention(**rules)
    proven = keys[: max(1, retention.last)]
    found = superfluous(finished, proven=proven, in_use=in_use, retention=retention, now=NOW)
    return sorted(found)


def steps(keys: list[StateId]) -> list[int]:
    return [step for step, _ in keys]


TEN = [kept(step) for step in range(100, 1100, 100)]


def test_without_a_rule_all_are_kept() -> None:
    """Without a rule, the default, all checkpoints stay."""
    assert gone(TEN) == []


def test_the_newest_are_kept() -> None:
    """`last` keeps this number of the newest checkpoints."""
    assert steps(gone(TEN, last=3)) == [100, 200, 300, 400, 500, 600, 700]
    assert gone(TEN, last=10) == []
    assert gone(TEN, last=11) == []


def test_the_first_of_so_many_steps_is_kept() -> None:
    """`every_steps` keeps the first checkpoint of each interval, also without an exact multiple.

    If two generations wrote a step, the later generation stays.
    """
    assert steps(gone(TEN, every_steps=400)) == [200, 300, 500, 600, 700, 900]
    odd = [kept(7), kept(95), kept(102), kept(140), kept(205), kept(290)]
    assert steps(gone(odd, every_steps=100)) == [95, 140]
    twice = [kept(100, 1), kept(100, 3), kept(150, 3), kept(190, 3)]
    assert gone(twice, every_steps=100) == [(100, 1), (150, 3)]


def test_the_best_are_kept() -> None:
    """`best` keeps the lowest or highest values, and ignores checkpoints without the metric."""
    some = [kept(1, loss=3.0), kept(2, loss=1.0), kept(3), kept(4, loss=2.0), kept(5, loss=9.0)]
    assert steps(gone(some, best=1, metric="loss")) == [1, 3, 4]
    assert steps(gone(some, best=2, metric="loss", highest=True)) == [2, 3, 4]
    assert steps(gone(some, best=1, metric="accuracy")) == [1, 2, 3, 4]
    same = [kept(1, loss=1.0), kept(2, loss=1.0), kept(3)]
    assert steps(gone(same, best=1, metric="loss")) == [1]


def test_the_young_are_kept() -> None:
    """`hours` uses the time of creation, and keeps a checkpoint with a time in the future."""
    some = [kept(1, hours=30), kept(2, hours=24), kept(3, hours=2), kept(4, hours=-1), kept(5)]
    assert steps(gone(some, hours=24)) == [1]


def test_rules_add_up() -> None:
    """A checkpoint stays if any rule keeps it, or if it is in use."""
    some = [kept(step, loss=float(step), hours=10 - step) for step in range(10)]
    rules = {"last": 1, "every_steps": 4, "best": 2, "metric": "loss", "hours": 1.5}
    assert steps(gone(some, **rules)) == [2, 3, 5, 6, 7]
    assert steps(gone(some, ((3, 1), (6, 1)), **rules)) == [2, 5, 7]


def test_what_a_job_makes_anew_is_kept() -> None:
    """After a roll back, the checkpoints of the new generation stay, as the job may need them."""
    some = [kept(10), kept(20), kept(30), kept(40), kept(15, 2), kept(25, 2)]
    assert gone(some, last=2) == [(10, 1), (20, 1)]


def test_too_few_valid_ones() -> None:
    """If fewer checkpoints are valid than the rules keep, no checkpoint is removed."""
    for proven in ((), ((9, 1),)):
        rules = Retention(last=2)
        found = superfluous(TEN, proven=proven, in_use=(), retention=rules, now=NOW)
        assert found == ()


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"last": -1}, "last is -1"),
        ({"every_steps": -5}, "every_steps is -5"),
        ({"best": 2}, "best and metric belong together"),
        ({"metric": "loss"}, "best and metric belong together"),
        ({"hours": -1.0}, "hours is -1"),
        ({"hours": float("nan")}, "hours is nan"),
    ],
)
def test_rules_that_cannot_be_meant(rules: dict[str, object], text: str) -> None:
    """Retention refuses a wrong rule and names it."""
    with pytest.raises(ValueError, match=text):
        Retention(**rules)


keys = st.builds(StateId, st.integers(0, 40), st.integers(0, 3))
checkpoints = st.builds(
    Kept,
    keys,
    st.floats(0, 2 * NOW),
    st.dictionaries(st.just("loss"), st.floats(allow_nan=False)),
)
some_rules = st.builds(
    Retention,
    last=st.integers(0, 5),
    every_steps=st.integers(0, 20),
    hours=st.floats(0, 500),
) | st.builds(Retention, best=st.integers(1, 4), metric=st.just("loss"), highest=st.booleans())


@given(
    st.lists(checkpoints, unique_by=lambda each: each.key),
    st.sets(keys),
    st.sets(keys),
    some_rules,
)
def test_any_store(
    finished: list[Kept], damaged: set[StateId], used: set[StateId], rules: Retention
) -> None:
    """The newest valid checkpoints and those in use stay, and a second removal changes nothing."""
    order = sorted((each.key for each in finished), reverse=True)
    valid = [key for key in order if key not in damaged]
    proven = valid[: max(1, rules.last)]
    found = superfluous(finished, proven=proven, in_use=used, retention=rules, now=NOW)
    assert set(found) <= set(order) - used - set(proven)
    assert set(valid[: rules.last]) <= set(order) - set(found)
    left = [each for each in finished if each.key not in found]
    again = superfluous(left, proven=proven, in_use=used, retention=rules, now=NOW)
    assert again == ()
