"""The watchdog of an agent: its reports, and its results when it inspects ranks closely."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs.driver import spec_of
from waiting import finished, turn_until, turns

from rekindle.agent import stacks, watchdog
from rekindle.agent.node_state import NodeState
from rekindle.agent.process_activity import MOVING_BYTES_PER_S, Activity, activities
from rekindle.agent.watchdog import OomCounter, Watchdog
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import BUSY_S, HeartbeatPage, RankActivity
from rekindle.recovery.policy.policy import Policy

POLICY = Policy()


class Node:
    """A watchdog of simulated ranks; the test sets the activity of their processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> None:
        self.sent: list[Any] = []
        self.ranks: dict[int, Any] = {rank: _process(rank, 100 + rank) for rank in range(ranks)}
        spec = spec_of(nodes=1, processes=ranks, policy=POLICY)
        self.positions: dict[int, Any] = {}
        state = NodeState(processes=ranks)
        self.watchdog = Watchdog(self.ranks, spec, self.sent.append, state, lambda: self.positions)
        self.now = self.watchdog._rested_at
        self.does = lambda: Activity(1.0, 0, "S")
        self.fails: Exception | None = None
        self.stack = ""
        monkeypatch.setattr(watchdog, "activities", self._activities)
        monkeypatch.setattr(watchdog, "CLOSE_LOOK_S", 0.001)
        monkeypatch.setattr(stacks, "stack_of", self._stack_of)

    def _activities(self, pids: list[int]) -> dict[int, Activity]:
        if self.fails is not None:
            raise self.fails
        return {pid: self.does() for pid in pids}

    async def _stack_of(self, pid: int, path: Path) -> str:
        return self.stack

    async def pass_time(self, seconds: float, step: float = 5.0) -> None:
        """Let simulated time pass, and let the watchdog look around every `step` seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.watchdog._look_around(self.now)
            await asyncio.gather(*self.watchdog._resting)

    async def look(self) -> p.RanksInspected:
        """Let the watchdog inspect all ranks, and return its answer."""
        await self.watchdog.look(p.InspectRanks(serial=7))
        return self.sent.pop()

    def start_anew(self, rank: int) -> None:
        """Replace the process of the rank."""
        self.ranks[rank] = _process(rank, self.ranks[rank].pid + 1000)


def _process(rank: int, pid: int) -> SimpleNamespace:
    page = HeartbeatPage(HeartbeatPage.create("test"))
    return SimpleNamespace(rank=rank, pid=pid, page=page, stack_file=Path("nowhere"))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def test_a_script_that_was_started_anew_has_not_rested(node: Node) -> None:
    """If a script restarts after half an hour of idle time, the new process is not idle yet."""

    async def run() -> p.RanksInspected:
        await node.pass_time(POLICY.idle_timeout_s + 15.0)
        assert node.sent[0] == p.RankStalled(rank=0, generation=0)
        node.sent.clear()
        assert (await node.look()).looks[0].late
        node.start_anew(0)
        await node.pass_time(0.5, 0.25)
        assert not node.sent
        return await node.look()

    (look,) = asyncio.run(run()).looks
    assert not look.late
    assert look.elapsed_s == 0.0


def test_a_look_that_fails_is_said_and_answered(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If an inspection fails, the agent prints the error and answers the coordinator with it.

    The next inspection can succeed.
    """

    async def run() -> tuple[p.RanksInspected, p.RanksInspected]:
        node.fails = OSError(24, "Too many open files")
        failed = await node.look()
        node.fails = None
        return failed, await node.look()

    failed, looked = asyncio.run(run())
    assert not failed.looks
    assert "Too many open files" in failed.error
    assert "Too many open files" in capfd.readouterr().err
    assert (len(looked.looks), looked.error) == (1, "")


def test_a_watch_goes_on_after_a_failure(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a look fails, the watchdog continues, and prints a repeated error once."""
    looked: list[float] = []

    def fails(self: Watchdog, now: float) -> None:
        looked.append(now)
        raise ValueError("a page of nonsense")

    async def run() -> None:
        watching = asyncio.create_task(node.watchdog.watch())
        await turn_until(lambda: len(looked) >= 3, "three looks")
        watching.cancel()

    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    monkeypatch.setattr(Watchdog, "_look_around", fails)
    asyncio.run(run())
    assert capfd.readouterr().err.count("a page of nonsense") == 1


def test_what_ranks_do_is_asked_again_after_a_failure(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the watchdog cannot read the ranks' activity, it tries again, and finds a later hang.

    It prints the error once.
    """

    async def run() -> None:
        node.fails = OSError(24, "Too many open files")
        await node.pass_time(20.0)
        node.fails = None
        await node.pass_time(POLICY.idle_timeout_s + 15.0)

    asyncio.run(run())
    assert capfd.readouterr().err.count("Too many open files") == 1
    assert node.sent[0] == p.RankStalled(rank=0, generation=0)


def test_a_devices_tool_that_hangs_does_not_hold_up_the_watch(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a device's tool hangs, the watchdog still looks at ranks and starts no second tool."""
    asked: list[object] = []

    async def hangs(devices: object) -> dict[int, int]:
        asked.append(devices)
        await asyncio.Event().wait()
        return {}

    async def run() -> None:
        while not asked:
            node.now += 0.25
            node.watchdog._look_around(node.now)
            await turns(1)
        for _ in range(100):
            node.now += 0.25
            node.watchdog._look_around(node.now)

    monkeypatch.setattr(watchdog.device_tools, "utilisations", hangs)
    asyncio.run(finished(run()))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("doing", "busy"), [(RankActivity.BETWEEN, True), (RankActivity.STEP, False)]
)
def test_who_moves_bytes_is_busy_but_in_a_step(doing: RankActivity, busy: bool, node: Node) -> None:
    """A rank that moves bytes is busy between two steps, but not within a step.

    Between two steps it may upload a file. In a hanging step a prefetching thread may move bytes.
    """
    node.ranks[0].page.begin(doing)
    moved = iter(range(0, 1 << 40, 1 << 30))
    node.does = lambda: Activity(1.0, next(moved), "S")
    (look,) = asyncio.run(node.look()).looks
    assert look.busy is busy


def test_who_prints_now_and_then_moves_nothing() -> None:
    """Small amounts of output, such as a progress bar's, do not count as moved bytes."""
    before = Activity(1.0, 0, "S")
    assert not Activity(1.0, 1000, "S").moves(before, 0.6)
    assert Activity(1.0, MOVING_BYTES_PER_S, "S").moves(before, 0.6)


def test_whoever_compiles_in_another_thread_compiles(node: Node) -> None:
    """If another thread of a rank compiles and its main thread waits, the rank is not late."""
    compiling = '  File "/x/torch/_inductor/compile_fx.py", line 3 in compile'
    node.stack = f'{compiling}\n\n  File "/x/train.py", line 9 in main'
    node.ranks[0].page.begin(RankActivity.STEP)
    node.watchdog._look_around(node.now)
    node.watchdog._watch._watched_s += BUSY_S - 1.0
    (look,) = asyncio.run(node.look()).looks
    assert not look.late
    assert look.where.startswith("main (")


def test_it_is_noted_when_the_kernel_kills(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look reads the kernel's count of OOM kills.

    So the agent does not mistake a rank's later end for an OOM kill.
    """
    counts = iter((1, *[2] * 9))
    monkeypatch.setattr(OomCounter, "_read", lambda self: next(counts))
    node.watchdog.oom = OomCounter()
    node.watchdog._look_around(10.0)
    assert node.watchdog.oom.killed_lately(11.0)
    assert not node.watchdog.oom.killed_lately(15.0)


@pytest.fixture
def nonsense() -> Iterator[int]:
    """Yield a process whose name is not valid UTF-8."""
    renames = (
        "import ctypes, signal\n"
        "ctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0)\n"
        "print('ready', flush=True)\n"
        "signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", renames], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process.pid
    process.kill()
    process.communicate()


@pytest.mark.process
def test_a_process_may_have_any_name(nonsense: int) -> None:
    """A process whose name is not valid UTF-8 does not disturb the watchdog or the stacks."""
    assert Path(f"/proc/{nonsense}/comm").read_bytes() == b"\xff\xfe\n"
    assert set(activities([nonsense, os.getpid()])) == {nonsense, os.getpid()}
    assert stacks._ask(nonsense, os.pidfd_open(nonsense), Path("nowhere")) == ""
