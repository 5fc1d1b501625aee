"""Policies: the order of strategies, and values that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.recovery.policy.policy import LADDER, Policy, Strategy, without_effect

RETRY, IN_PLACE = Strategy.RETRY, Strategy.RECOVER_IN_PLACE
RECOVER, SHRINK = Strategy.RECOVER, Strategy.SHRINK
HANG_RESTART, RESTART = Strategy.HANG_RESTART, Strategy.RESTART
DUMP, FAIL = Strategy.DUMP, Strategy.FAIL


def test_a_policy_keeps_its_order() -> None:
    """A strategy that the policy does not name keeps its place, so reasons name it in order."""
    assert Policy().ladder == LADDER
    ladder = Policy(strategies=(RESTART, DUMP, RECOVER, RETRY)).ladder
    places = {strategy: ladder.index(strategy) for strategy in ladder}
    assert places == {
        **{strategy: place for place, strategy in enumerate(LADDER)},
        RESTART: LADDER.index(RETRY),
        RETRY: LADDER.index(RESTART),
    }
    assert sorted(ladder) == sorted(LADDER)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"strategies": (FAIL,)}, "choose from"),
        ({"strategies": (RETRY, RETRY)}, "names retry twice"),
        ({"approve": (DUMP,)}, "choose from"),
        ({"max_reschedules": -1}, "max_reschedules"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"max_recoveries": -1}, "max_recoveries"),
        ({"max_in_row": -1}, "max_in_row"),
        ({"leave_timeout_s": 0.0}, "leave_timeout_s"),
        ({"join_timeout_s": -1.0}, "join_timeout_s"),
        ({"node_timeout_s": float("nan")}, "node_timeout_s"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(settings: dict[str, Any], word: str) -> None:
    """The error names the wrong value."""
    with pytest.raises(ValueError, match=word):
        Policy(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, []),
        ({"max_reschedules": 8}, []),
        ({"strategies": (RETRY,)}, []),
        ({"strategies": (RETRY,), "max_in_row": 2}, []),
        (
            {"strategies": (RESTART,), "max_reschedules": 8},
            ["max_reschedules has no effect, because strategies does not name "
             "reschedule-job-isolated or reschedule-job"],
        ),
        ({"strategies": (RETRY,), "max_restarts": 9}, ["max_restarts has no effect"]),
        ({"strategies": (RETRY,), "approve": (RESTART,)}, ["approve: restart has no effect"]),
        ({"approval_timeout_s": 9.0}, ["approval_timeout_s has no effect"]),
    ],
)  # fmt: skip
def test_a_value_that_no_strategy_reads(settings: dict[str, Any], words: list[str]) -> None:
    """Only a changed value that no strategy of the policy reads is named, with the reason."""
    found = without_effect(Policy(**settings))
    assert len(found) == len(words)
    assert all(map(str.startswith, found, words))
