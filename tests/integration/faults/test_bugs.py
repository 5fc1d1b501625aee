"""Bugs in the coordinator: it reports each one and ends, and another coordinator continues."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import aiohttp
import msgspec
import pytest
from broken import Bug
from jobs import Place
from waiting import finished, run_command, turn_until

from rekindle import names
from rekindle.agent.ranks import RankSupervisor
from rekindle.coordinator.inputs import KEPT
from rekindle.coordinator.machine.admission import Admission
from rekindle.coordinator.machine.job_state import Phase, Timer
from rekindle.coordinator.machine.machine import OF_ANY_AGENT
from rekindle.coordinator.machine.stragglers import ProfilingSwitch
from rekindle.coordinator.process import Coordinator
from rekindle.engines.base import MOST_REVIVALS
from rekindle.errors import ProtocolError, UnansweredError, UnexpectedError
from rekindle.job.spec import EntryKind, JobDirectory, JobSpec, bearer
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol import agent as p
from rekindle.protocol.http_views import Stop
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.journal import journal
from rekindle.supervised import BugReport

WAITS = """
import os, time

print("runs", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def example(of: Any) -> Any:
    """Return a value of an annotation: zero, an empty text, or the first of several types."""
    if get_origin(of) in (tuple, dict):
        return get_origin(of)()
    if get_args(of):
        return example(get_args(of)[0])
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        hints, fields = get_type_hints(of), msgspec.structs.fields(of)
        return of(**{each.name: example(hints[each.name]) for each in fields if each.required})
    return next(iter(of)) if hasattr(of, "__members__") else of()


class Live:
    """A coordinator with one node, whose agent is this test."""

    def __init__(self, folder: Path) -> None:
        self.directory = JobDirectory(folder / "job")
        spec = JobSpec(
            job_id="bug",
            entry=EntryKind.PROGRAM,
            target="/bin/true",
            nodes=1,
            processes_per_node=1,
            directory=str(self.directory.path),
            working_directory=str(folder),
            log_directory=str(folder / "logs"),
            checkpoint_store=str(folder / "checkpoints"),
        )
        self.directory.create(spec)
        self.loop = asyncio.new_event_loop()
        self.coordinator = self.loop.run_until_complete(self._create())
        self.machine = self.coordinator.machine
        self._client: aiohttp.ClientSession
        self._socket: aiohttp.ClientWebSocketResponse[bool]
        self._url = ""

    async def _create(self) -> Coordinator:
        return Coordinator(self.directory, 0)

    def break_down(self, *_: object, **__: object) -> None:
        """Change a half of the state, and raise an error."""
        self.machine.job.record(journal.CheckpointSkipped(path="half of a transition", reason=""))
        raise KeyError("a bug")

    async def send(self, message: p.Message) -> None:
        await self._socket.send_bytes(p.encode(message))

    async def close(self) -> None:
        await self._socket.close()

    async def order(self, path: str, order: msgspec.Struct) -> None:
        """Send an order. The coordinator answers that it ends, or it has ended already."""
        body = msgspec.json.encode(order)
        async with self._client.post(f"{self._url}{path}", data=body) as answer:
            assert answer.status == 503

    def run(self, act: Callable[[], Awaitable[object]]) -> UnexpectedError:
        """Run the coordinator, let the node join, act, and return the error of the coordinator."""
        return self.loop.run_until_complete(self._run(act))

    async def _run(self, act: Callable[[], Awaitable[object]]) -> UnexpectedError:
        listener = socket.create_server((names.LOOPBACK, 0))
        listener.setblocking(False)
        self._url = f"http://{names.LOOPBACK}:{listener.getsockname()[1]}"
        hello = p.Hello(
            job_id="bug",
            attempt=0,
            version=names.WIRE_VERSION,
            node=0,
            address=names.LOOPBACK,
            pid=1,
            processes=1,
        )
        running = asyncio.create_task(self.coordinator.run(listener))
        headers = {
            "Authorization": bearer(self.directory.secret()),
            names.HEADER_WIRE: str(names.WIRE_VERSION),
        }
        async with aiohttp.ClientSession(headers=headers) as self._client:
            self._socket = await self._client.ws_connect(f"{self._url}{names.PATH_AGENT}")
            await self.send(hello)
            await turn_until(lambda: self.machine.job.roster.nodes, "the node")
            await act()
            with pytest.raises(UnexpectedError) as caught:
                await finished(running)
            await self._socket.close()
        return caught.value

    def report(self) -> BugReport:
        """Return the only report of a bug."""
        [file] = self.directory.path.glob("coordinator-bug-*")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert self.directory.secret() not in file.read_text()
        return msgspec.json.decode(file.read_bytes(), type=BugReport)

    def check(self, ended: UnexpectedError, kind: str) -> None:
        """Check the report and the journal after a bug in an input of this kind."""
        report = self.report()
        assert report.error == "KeyError('a bug')"
        assert "break_down" in report.traceback
        assert report.inputs[-1]["kind"] == kind
        assert report.error in str(ended)
        assert f"{self.directory.path}/coordinator-bug-1.json" in str(ended)
        events = journal.read(self.directory.journal_file.read_bytes().splitlines())
        assert [type(each) for each in events] == [journal.JobStarted, journal.NodeJoined]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path / "place") as made:
        yield made


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    made = Live(tmp_path)
    yield made
    made.loop.close()


@pytest.mark.parametrize(
    "kind", sorted(get_args(p.FromAgent), key=str), ids=lambda kind: kind.__name__
)
def test_a_bug_in_the_handler_of_a_message(
    live: Live, kind: type[p.Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator ends. Nothing of the half transition happens, and no node is lost."""
    message = example(kind)

    async def act() -> None:
        if kind in OF_ANY_AGENT:
            monkeypatch.setattr(live.machine, "_on_message_of_agent", live.break_down)
        else:
            monkeypatch.setitem(live.machine._handlers, kind, live.break_down)
        await live.send(message)

    live.check(live.run(act), "message")
    assert msgspec.convert(live.report().inputs[-1]["content"], kind) == message


@pytest.mark.parametrize("timer", Timer)
@pytest.mark.parametrize("ending", [False, True], ids=["", "ending"])
def test_a_bug_in_the_handler_of_a_timer(live: Live, timer: Timer, ending: bool) -> None:
    """The coordinator ends also if a time limit meets a bug, and while the job ends."""
    machine = live.machine
    table = machine._ending_timers if ending else machine._timers
    table[timer] = live.break_down

    async def act() -> None:
        if ending:
            machine.job.phase = Phase.STOPPING
        live.coordinator._set_timer(timer, 0)

    live.check(live.run(act), "timer")


def test_a_bug_in_the_handler_of_a_lost_agent(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator ends if the loss of an agent meets a bug."""
    monkeypatch.setattr(live.machine.losses, "on_agent_lost", live.break_down)
    live.check(live.run(live.close), "loss")


ORDERS = {
    names.PATH_INJECT: ("injections", "inject", p.Inject),
    names.PATH_PROFILE: ("switch", "switch", ProfilingOrder),
    names.PATH_APPROVE: ("recovery", "approve", p.Approval),
    names.PATH_STOP: ("endings", "stop", Stop),
    names.PATH_HEALTH_EVENTS: ("health", "on_health_event", HealthEvent),
}


@pytest.mark.parametrize("path", ORDERS)
def test_a_bug_in_the_handler_of_an_order(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator ends if an order of a person or a monitor meets a bug."""
    part, method, kind = ORDERS[path]
    monkeypatch.setattr(getattr(live.machine, part), method, live.break_down)
    live.check(live.run(lambda: live.order(path, example(kind))), "order")


def test_a_bug_at_a_stop(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator ends if the stop by a signal meets a bug."""
    monkeypatch.setattr(live.machine.endings, "stop", live.break_down)

    async def act() -> None:
        live.coordinator.stop("stopped by SIGTERM")

    live.check(live.run(act), "stop")


def test_an_error_of_a_message_does_not_hide_a_bug(live: Live) -> None:
    """A ProtocolError after a change of the state is a bug: the state is half changed."""

    def refuse_late(*_: object) -> None:
        live.machine.job.record(journal.CheckpointSkipped(path="half", reason=""))
        raise ProtocolError("too late")

    live.machine._handlers[p.Heartbeat] = refuse_late
    ended = live.run(lambda: live.send(p.Heartbeat(finished={})))
    assert "ProtocolError('too late')" in str(ended)


def test_a_bug_beside_the_machine(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator ends if one of its tasks fails, and names the task."""

    begin = asyncio.Event()

    async def fail() -> None:
        await begin.wait()
        raise KeyError("a bug")

    monkeypatch.setattr(live.coordinator, "report_progress", fail)

    async def act() -> None:
        begin.set()

    assert "the task 'progress' failed: KeyError('a bug')" in str(live.run(act))
    assert "in fail" in live.report().traceback


def test_a_report_has_the_last_inputs(live: Live) -> None:
    """A report has the newest inputs, also those that JSON cannot hold."""
    steps = range(2 * KEPT)

    def noted() -> int:
        return live.machine.checkpoints.total

    async def after_all() -> None:
        for step in steps:
            await live.send(p.Heartbeat(finished={}, total=step))
        await turn_until(lambda: noted() == steps[-1], "all heartbeats")
        live.coordinator.inputs.give("order", {1j: "no JSON"}, live.break_down)

    live.check(live.run(after_all), "order")
    *messages, order = live.report().inputs
    assert [each["content"]["total"] for each in messages] == [*steps[1 - KEPT :]]
    assert order["content"] == "{1j: 'no JSON'}"


def test_rekindle_run_survives_a_bug(place: Place) -> None:
    """The launcher replaces a coordinator that met a bug, and the job succeeds."""
    bug = Bug(place.folder, ProfilingSwitch.switch)
    script = place.script(WAITS)
    run = place.start_quick(script, "--nproc-per-node", "2", env=place.environment(bug.environment))
    run.wait_for_output(0, "runs")
    bug.begin()
    with pytest.raises(UnansweredError):
        run.client().profile(ProfilingOrder(on=True))
    run.wait_event(journal.NodeJoined, 2)
    run.client().profile(ProfilingOrder(on=True))
    (place.folder / "go").touch()
    run.end(0)
    [report] = run.directory.path.glob("coordinator-bug-*")
    line = " ERROR coordinator: the coordinator ends, because of a bug: KeyError('a bug of"
    assert run.stderr.count(line) == 1
    assert f"{report} has the stack and the last inputs" in run.stderr
    status = run_command(
        [sys.executable, "-m", "rekindle.cli.main", "status", "job"], env=place.environment()
    )
    assert f"a bug in Rekindle: KeyError('a bug of the test')\n  {report}" in status.stdout
    assert "a new coordinator replaces it" in run.stderr


def test_an_agent_that_loses_a_task_ends(place: Place) -> None:
    """An agent whose heartbeats meet a bug ends and names the task; another one replaces it."""
    bug = Bug(place.folder, RankSupervisor.beat)
    script, options = place.script(WAITS), ("--nproc-per-node", "2", "--max-restarts", "1")
    run = place.start_quick(script, *options, env=place.environment(bug.environment))
    run.wait_for_output(0, "runs")
    bug.begin()
    run.wait_event(journal.RanksStarted, 2)
    (place.folder / "go").touch()
    run.end(0)
    error = "the agent ends, because the task 'heartbeat' failed: KeyError('a bug of the test')"
    assert run.stderr.count(f" ERROR agent node=0: {error}") == 1
    assert "in broken" in run.stderr
    assert [event.node for event in run.events_of(journal.NodeWanted)] == [0]


@pytest.mark.soak
def test_a_bug_of_each_coordinator_ends_the_job(place: Place) -> None:
    """If all coordinators meet the same bug, the launcher gives up, and nothing remains."""
    bug = Bug(place.folder, Admission.on_hello, once=False)
    script = place.script(WAITS)
    run = place.start_quick(script, "--nproc-per-node", "2", env=place.environment(bug.environment))
    run.wait_for_output(0, "runs")
    bug.begin()
    os.kill(run.endpoint().pid, signal.SIGKILL)
    run.end(1)
    assert len([*run.directory.path.glob("coordinator-bug-*")]) == MOST_REVIVALS
    assert "rekindle: the job failed" in run.stderr
