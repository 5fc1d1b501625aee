"""Health events for a coordinator that does not answer, or refuses them."""

from __future__ import annotations

import threading

import pytest
from waiting import wait_set

from rekindle.engines.kubernetes.watchers import job_watcher as reporting
from rekindle.engines.kubernetes.watchers.job_watcher import HealthEventQueue
from rekindle.errors import JobError, UnansweredError
from rekindle.recovery.faults.classification import EventSource, HealthEvent


def event_of(what: str) -> HealthEvent:
    return HealthEvent(source=EventSource.POD_REASON, what=what, node=0)


class Coordinator:
    """A coordinator that does not answer the first calls."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.received: list[str] = []
        self.all = threading.Event()

    def receive(self, event: HealthEvent) -> None:
        if self.away:
            self.away -= 1
            raise UnansweredError("nobody is there")
        self.received.append(event.what)
        if event.what == "last":
            self.all.set()
        if event.what == "strange":
            raise JobError("the job has no such node")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "AGAIN_S", 0.001)


def test_what_was_not_heard_is_said_again_in_its_order() -> None:
    """The queue repeats unanswered events in order, and sends a refused event once."""
    messages: list[str] = []
    there = Coordinator(away=3)
    with HealthEventQueue(there.receive, messages.append).open() as say:
        for what in ("first", "strange", "last"):
            say(event_of(what))
        wait_set(there.all)
    assert (there.received, messages) == (["first", "strange", "last"], [])


def test_what_is_late_is_left_out_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "LATE_S", 0.0)
    messages: list[str] = []
    there = Coordinator(away=1)
    with HealthEventQueue(there.receive, messages.append).open() as say:
        say(event_of("first"))
        say(event_of("last"))
        wait_set(there.all)
    assert there.received == ["last"]
    assert messages == [
        "pod-reason first on node 0: Rekindle could not report it, because the coordinator did "
        "not answer for too long"
    ]


def test_nobody_waits_for_one_that_stays_away() -> None:
    """If the coordinator never answers, neither a caller nor the end of the queue waits."""
    there = Coordinator(away=10**9)
    with HealthEventQueue(there.receive, print).open() as say:
        say(event_of("first"))
    assert there.received == []
