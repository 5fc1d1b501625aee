"""A rank's member: what it sends, and which errors end the forming of a generation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from ranks.agent import Agent
from waiting import wait_until

from rekindle import names
from rekindle.errors import CheckpointError, SessionError
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank import member as members
from rekindle.rank.channel import Channel
from rekindle.rank.member import Arrival, Member, Recovery
from rekindle.rank.progress import HeldState, ProgressReporter
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.plan import RankPlan, StateSource


def form_of(generation: int) -> protocol.FormGeneration:
    """Return the coordinator's order to form a generation."""
    return protocol.FormGeneration(
        generation=generation,
        world_size=1,
        store_host="",
        store_port=0,
        step=4,
        state_generation=1,
        ranks={0: 0},
        plan={0: RankPlan(source=StateSource.SELF)},
    )


class Framework:
    """A framework whose `form` runs one function of the test for each generation."""

    def __init__(self, state: HeldState) -> None:
        self.state = state
        self.forming: list[Callable[[], None]] = []
        self.kinds: dict[type[BaseException], FaultKind] = {ConnectionError: FaultKind.LINK}
        self.stopped: list[int] = []
        self.recovered = 0

    def arrival(self) -> Arrival:
        return Arrival(done=False, shard=3, valid_steps=2, port=7)

    def recover(self) -> None:
        self.recovered += 1

    def enter(self, form: protocol.FormGeneration) -> Callable[[protocol.GenerationEnded], None]:
        return lambda over: self.stopped.append(over.generation)

    def form(self, form: protocol.FormGeneration) -> None:
        if self.forming:
            self.forming.pop(0)()
        self.state.hold((form.step, form.state_generation))

    def failed(self, error: BaseException) -> FaultKind | None:
        return self.kinds.get(type(error))


class Rank:
    """A member, and the agent at the other end of its channel."""

    def __init__(self) -> None:
        self.agent = Agent([form_of(1), form_of(2)])
        channel = Channel.from_environment()
        assert channel is not None
        self.framework = Framework(state := HeldState())
        self.told: list[Recovery] = []
        progress = ProgressReporter(HeartbeatPage())
        self.member = Member(channel, 0, progress, state, self.framework, self.told.append)

    def sent(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Wait until the agent has received `count` messages of a kind, and return them."""

        def found() -> list[Any]:
            return [each for each in self.agent.received if isinstance(each, kind)]

        wait_until(lambda: len(found()) >= count, f"{count} {kind.__name__}")
        return found()

    def fails(self, error: BaseException, *, ends: bool = False) -> None:
        """Let the next forming raise the error. ends: its generation ends before that."""

        def form() -> None:
            if ends:
                self.agent.over(1)
                wait_until(lambda: self.member.is_over, "the end of generation 1")
            raise error

        self.framework.forming.append(form)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(members, "NOTICE_S", 0.0)
    monkeypatch.setenv(names.ENV_CHANNEL_FD, "")
    found = Rank()
    os.dup(found.agent._mine.fileno())  # never closed: a rank without an agent kills its process
    return found


def test_a_rank_arrives_forms_and_reports_its_first_step(rank: Rank) -> None:
    """Each message has the number of its generation; the first step is reported once."""
    assert rank.member.join()
    rank.member.step_done()
    rank.member.step_done()
    (arrived,) = rank.sent(protocol.Arrived)
    assert arrived.sources
    arrived = msgspec.structs.replace(arrived, sources={})
    assert arrived == protocol.Arrived(rank=0, generation=0, shard=3, valid_steps=2, port=7)
    assert rank.sent(protocol.StateReady) == [protocol.StateReady(rank=0, generation=1, finished=4)]
    assert rank.sent(protocol.StepDone) == [protocol.StepDone(rank=0, generation=1, finished=4)]
    assert rank.framework.recovered == 2


def test_the_hook_learns_of_a_recovery(rank: Rank) -> None:
    """The hook gets the cause when the rank has left its generation, and the strategy after it."""
    ended = protocol.Cause(kind="process", ranks=(1,))
    decided = protocol.Cause(kind="process", strategy="recover-in-place", ranks=(1,))
    rank.agent._forms = iter([form_of(1), msgspec.structs.replace(form_of(2), cause=decided)])
    assert rank.member.join()
    assert rank.told == []
    rank.agent._say(protocol.GenerationEnded(generation=1, cause=ended))
    wait_until(lambda: rank.member.is_over, "the end of generation 1")
    assert rank.member.join()
    assert rank.told == [
        Recovery("before", "process", "", (1,), 4),
        Recovery("after", "process", "recover-in-place", (1,), 4),
    ]


def test_a_source_that_lacks_the_state_is_reported(rank: Rank) -> None:
    """If its source lacks the state, the rank reports that, and arrives again after the end."""

    def form() -> None:
        rank.agent.over(1)
        raise CheckpointError("no checkpoint of step 4")

    rank.framework.forming.append(form)
    assert rank.member.join()
    first, second = rank.sent(protocol.StateReady, 2)
    assert (first.error, second.error) == ("no checkpoint of step 4", "")
    assert [each.generation for each in rank.sent(protocol.Arrived, 2)] == [0, 1]
    assert rank.framework.stopped == [1]


def test_a_fault_while_a_generation_forms(rank: Rank) -> None:
    """If a fault breaks the forming, the coordinator gets one line of at most 500 characters."""
    rank.fails(ConnectionError("peer " + "x" * 1000 + "\nsecond line"))
    assert rank.member.join()
    (failed,) = rank.sent(protocol.StepFailed)
    assert (failed.kind, failed.valid_steps, failed.generation) == (FaultKind.LINK, 2, 1)
    assert failed.error == ("ConnectionError: peer " + "x" * 1000)[:500]


@pytest.mark.parametrize("error", [ValueError("no such row"), SessionError("another model")])
def test_the_scripts_own_error_passes_through(rank: Rank, error: Exception) -> None:
    """If the script's own error breaks the forming, `join` raises it and sends no StepFailed.

    The agent reports the end of the process.
    """
    rank.fails(error)
    with pytest.raises(type(error), match=str(error)):
        rank.member.join()
    assert not [each for each in rank.agent.received if isinstance(each, protocol.StepFailed)]


def test_an_unknown_error_of_an_ended_generation_is_in_the_log(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown error in an ended generation forms the next one, and the log has its traceback.

    A framework's collectives fail like this when a peer dies.
    """
    rank.fails(ValueError("no such row"), ends=True)
    with caplog.at_level(logging.WARNING):
        assert rank.member.join()
    assert "ValueError: no such row" in caplog.text
    assert not [each for each in rank.agent.received if isinstance(each, protocol.StepFailed)]


def test_a_session_error_is_never_the_end_of_a_generation(rank: Rank) -> None:
    """A SessionError ends the script even in an ended generation, because a retry cannot help."""
    rank.fails(SessionError("another model"), ends=True)
    with pytest.raises(SessionError, match="another model"):
        rank.member.join()


@pytest.mark.parametrize(
    ("kind", "own", "is_sent"),
    [
        (FaultKind.LINK, False, False),
        (FaultKind.TRANSIENT, False, False),
        (FaultKind.TRANSIENT, True, True),
        (FaultKind.DEVICE_MEMORY, False, True),
    ],
)
def test_a_fault_in_a_generation_that_has_ended(
    rank: Rank, kind: FaultKind, own: bool, is_sent: bool
) -> None:
    """In an ended generation, the rank reports only faults that the end cannot cause.

    The end breaks links, but does not damage memory.
    """
    assert rank.member.join()
    rank.agent.over(1)
    wait_until(lambda: rank.member.is_over, "the end of generation 1")
    rank.member.report(kind, "x", own=own)
    assert rank.member.join()  # then the agent has received all earlier messages
    found = [each for each in rank.agent.received if isinstance(each, protocol.StepFailed)]
    assert len(found) == is_sent


def test_the_log_has_the_traceback_of_a_fault(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the traceback of each fault, because a script's own error may look like one."""
    assert rank.member.join()
    with caplog.at_level(logging.WARNING):
        rank.member.break_off(FaultKind.LINK, RuntimeError("NCCL error in: labels.py"))
    assert "NCCL error in: labels.py" in caplog.text
    (failed,) = rank.sent(protocol.StepFailed)
    assert failed.error == "RuntimeError: NCCL error in: labels.py"


def test_all_ranks_may_leave(rank: Rank) -> None:
    """After a dismissal `join` returns False, and the member knows how many steps are finished."""
    assert rank.member.join()
    rank.agent.over(1)
    assert rank.member.join()
    rank.agent.over(2)
    assert not rank.member.join()
    assert (rank.member.session_ended, rank.member.ended_step) == (True, 4)
