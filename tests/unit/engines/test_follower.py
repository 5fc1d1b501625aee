"""The follower of a job: the events that it requests, and its reaction to a failed coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle.engines.follower import JobFollower
from rekindle.errors import JobError, LeaseHeldError, UsageError
from rekindle.job.spec import Endpoint
from rekindle.recovery.journal.journal import Ended, JobStarted, NodeWanted, Progress

HERE = Endpoint(host="127.0.0.1", port=1, pid=1, attempt=0)
STARTED = {"job_id": "j", "attempt": 0, "nodes": 1, "processes_per_node": 1, "pid": 1}
END = Ended(seq=9, outcome="succeeded", reason="", finished=3)


class SimulatedEngine:
    """An engine whose coordinators each send some events, and then raise an error.

    answers: whether the coordinator answers after the end of its stream.
    """

    def __init__(self, *lives: list[Any]) -> None:
        self.lives = list(lives)
        self.asked: list[int] = []
        self.tokens: set[str] = set()
        self.limits: list[float] = []
        self.brought: list[int] = []
        self.learned: list[int] = []
        self.revived = 0
        self.answers = False
        self.events: list[Any] = []
        self.taken = False

    def client(self, _: Endpoint) -> Any:
        return SimpleNamespace(steer=self._steer)

    @contextlib.contextmanager
    def _steer(self, *, holder: str, token: str, since: int) -> Iterator[Iterator[Any]]:
        assert holder == "the test"
        self.tokens.add(token)
        self.asked.append(since)
        life = self.lives.pop(0)
        if life and isinstance(life[0], Exception):
            raise life[0]
        yield self._events(life)

    def _events(self, life: list[Any]) -> Iterator[Any]:
        for event in life:
            if isinstance(event, Exception):
                raise event
            yield event

    def revive(self) -> Endpoint:
        self.revived += 1
        if self.taken:
            raise UsageError("the port is in use")
        return HERE

    def alive(self, *, limit_s: float) -> Endpoint | None:
        self.limits.append(limit_s)
        return HERE if self.answers else None

    def history(self) -> list[Any]:
        return self.events

    def learn(self, event: Any) -> None:
        self.learned.append(event.seq)

    def replace(self, node: int) -> None:
        self.brought.append(node)
        if node == 7:
            raise JobError("no host is free")


class Followed:
    """A follower of a simulated job, and its records."""

    def __init__(self, *lives: list[Any], stopped: bool = False) -> None:
        self.engine = SimulatedEngine(*lives)
        self.events: list[Any] = []
        self.texts: list[str] = []
        self.held: list[bool] = []
        self.follower = JobFollower(
            self.engine,  # type: ignore[arg-type]
            holder="the test",
            see=self.events.append,
            say=self.texts.append,
            is_stopped=lambda: stopped,
        )

    def follow(self, since: int = 0) -> Followed:
        self.follower.follow(HERE, since, self.held.append)
        return self


def wanted(seq: int, node: int = 1) -> NodeWanted:
    return NodeWanted(seq=seq, node=node)


def test_the_next_coordinator_sends_what_is_not_known_yet() -> None:
    """The follower requests only new events from the next coordinator.

    A Progress event has no number, and is often the last event of a coordinator.
    """
    died = [wanted(4), Progress(finished=3, newest=3, total=9, metrics={}), JobError("it died")]
    job = Followed(died, [END]).follow(since=2)
    assert job.engine.asked == [2, 4]
    assert job.engine.brought == [1]
    assert job.engine.learned == [4, 9]
    assert [each.seq for each in job.events] == [4, 0, 9]
    assert job.texts == ["it died; a new coordinator replaces it"]


def test_the_lease_is_held_first_once() -> None:
    """The follower reports its first lease once, also if the first coordinator died before it."""
    job = Followed([JobError("it died")], [wanted(1), JobError("it died")], [END]).follow()
    assert job.held == [True, False]


def test_another_process_steers_the_job() -> None:
    with pytest.raises(LeaseHeldError):
        Followed([LeaseHeldError("another")], [END]).follow()


def test_a_job_that_a_person_stops_gets_no_other_coordinator() -> None:
    job = Followed([JobError("it died")], [END], stopped=True).follow()
    assert len(job.engine.lives) == 1


def test_a_job_that_has_ended_gets_no_other_coordinator() -> None:
    """A follower that was stopped during the job's end reads the last events in the journal."""
    job = Followed([wanted(7), JobError("it has ended")], [END])
    job.engine.events = [JobStarted(seq=1, **STARTED), wanted(7), wanted(8), END]
    assert job.follow().events == [wanted(7), wanted(8), END]
    assert job.engine.brought == [1]
    assert job.engine.revived == 0


def test_events_that_a_failed_coordinator_did_not_write_are_asked_for_again() -> None:
    """The next coordinator gives the numbers of such events to its own events."""
    died = [wanted(4), wanted(5), JobError("it died on a full disk")]
    job = Followed(died, [END])
    job.engine.events = [JobStarted(seq=1, **STARTED), wanted(4)]
    job.follow(since=2)
    assert job.engine.asked == [2, 4]


def test_the_end_of_an_earlier_attempt_is_not_the_end() -> None:
    """A coordinator that fails before it records its attempt is replaced."""
    job = Followed([JobError("it died")], [END])
    job.engine.events = [JobStarted(seq=1, **STARTED | {"attempt": -1}), END]
    job.follow()
    assert job.engine.revived == 1


def test_coordinators_that_die_one_after_the_other() -> None:
    """After several coordinators died, the follower gives up, because the cause persists.

    The events of a takeover are no progress: each of these coordinators records its start.
    """
    job = Followed(*[[wanted(number), JobError("it died")] for number in range(1, 20)]).follow()
    assert len(job.engine.asked) == 11


def test_each_failure_doubles_the_patience() -> None:
    """A coordinator that is slow on a busy machine gets more time than the one before it."""
    job = Followed(*[[JobError("it is slow")]] * 20).follow()
    assert job.engine.limits == [10, 20, 40, 80, 160, *[320] * 6]


def test_a_finished_step_ends_the_count_of_failures() -> None:
    """A job of weeks may lose more coordinators than the limit, if it trains between the losses."""
    lives = [
        [Progress(finished=n, newest=n, total=99, metrics={}), JobError("it died")]
        for n in range(1, 31)
    ]
    job = Followed(*lives, [END]).follow()
    assert job.engine.revived == 30
    assert job.events[-1] == END


def test_broken_streams_of_a_living_coordinator_cost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each broken stream leads to a new one with the same token, and to no other coordinator."""
    monkeypatch.setattr("rekindle.engines.follower._FIRST_PAUSE_S", 0.0)
    job = Followed(*[[JobError("the proxy ended the stream")]] * 30, [END])
    job.engine.answers = True
    assert job.follow().events == [END]
    assert job.engine.revived == 0
    assert len(job.engine.tokens) == 1


def test_an_address_that_another_process_took() -> None:
    """The error names the cause if the next coordinator cannot have the address."""
    job = Followed([JobError("it died")])
    job.engine.taken = True
    with pytest.raises(JobError, match="cannot replace the job's coordinator: the port is in use"):
        job.follow()


def test_a_node_that_cannot_be_brought() -> None:
    job = Followed([wanted(1, node=7), wanted(2, node=-1), END]).follow()
    assert job.engine.brought == [7, -1]
    assert job.texts == ["Rekindle cannot replace node 7: no host is free"]
