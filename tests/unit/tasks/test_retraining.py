"""The valid output of an evaluation, and its limits."""

from __future__ import annotations

import contextlib

import pytest

from rekindle.errors import JobError, RejectedError
from rekindle.tasks.retraining import judge, read_metrics


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("done", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"loss": "low"}', "not a number"),
        ('{"loss": true}', "not a number"),
    ],
)
def test_what_an_evaluation_may_say(line: str, words: str) -> None:
    """read_metrics() refuses a line that is not one JSON object with numbers."""
    with pytest.raises(JobError, match=words):
        read_metrics(line)


def test_metrics_are_held_against_their_limits() -> None:
    """judge() rejects a metric that is missing, not a number, too low or too high."""
    judge({"a": 1.0, "b": 2.0}, at_least={"a": 1.0}, at_most={"b": 2.0})
    for metrics, words in (
        ({"a": 0.5}, "a is 0.5"),
        ({}, "not have the metric a"),
        ({"a": float("nan")}, "nan"),
    ):
        with pytest.raises(RejectedError, match=words):
            judge(metrics, at_least={"a": 1.0}, at_most={})
    with contextlib.suppress(RejectedError):
        judge({"b": 3.0}, at_least={}, at_most={"b": 2.0})
        pytest.fail("3 passes a limit of 2")
