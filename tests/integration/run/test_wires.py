"""A job refuses unauthorised and invalid requests and continues."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType
from jobs import Place
from waiting import bound_s, run_command

from rekindle import names
from rekindle.engines.client import JobClient
from rekindle.errors import JobError, LeaseHeldError
from rekindle.job.spec import Endpoint, bearer
from rekindle.profiling.switch import switch_of
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal

WAITS = """
import os, time

print("runs", os.environ["RANK"])
while not os.path.exists("go"):
    time.sleep(0.02)
"""


class Live:
    """A job whose ranks run until `end`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.run = place.start_quick(place.script(WAITS), "--nproc-per-node", "2")
        self.run.wait_for_output(0, "runs")
        self.run.wait_for_output(1, "runs")
        self.where: Endpoint = self.run.endpoint()
        self.secret = self.run.directory.secret()
        self.before = self.state()

    def state(self) -> tuple[object, ...]:
        view = JobClient(self.where, self.secret).status()
        return view.state, view.generation, [rank.pid for rank in view.ranks], view.nodes

    def end(self) -> None:
        """Check that the job has not changed; let it complete."""
        assert self.state() == self.before
        (self.place.folder / "go").touch()
        self.run.end(0)
        assert not journal.incidents(self.run.events())


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run one job for all tests of this file; no test may change its state."""
    with Place(tmp_path_factory.mktemp("wires") / "place") as place:
        job = Live(place)
        yield job
        job.end()


def ask(live: Live, method: str, path: str, authorization: str | None) -> tuple[int, bytes]:
    """Send one request; return its status and its answer."""
    connection = http.client.HTTPConnection(live.where.host, live.where.port, timeout=bound_s())
    headers = {"Authorization": authorization} if authorization is not None else {}
    try:
        connection.request(method, path, b"{}", headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("authorization", [None, "", "Bearer ", "Bearer wrong", "Basic x", "ü"])
def test_a_wrong_secret_is_refused_everywhere(live: Live, authorization: str | None) -> None:
    """Each path answers 401 with a clear text and no facts of the job."""
    given = authorization.encode() if authorization is not None else None
    paths = {getattr(names, name) for name in dir(names) if name.startswith("PATH_")}
    for path in sorted(paths):
        method = "POST" if path == names.PATH_STOP else "GET"
        status, answer = ask(live, method, path, given)
        assert status == 401, path
        error = (
            "wrong or missing secret for job job; give the secret of this job in REKINDLE_SECRET"
        )
        assert json.loads(answer) == {"error": error}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/no-such-path", 404),
        ("POST", names.PATH_JOB, 405),
        ("GET", f"{names.PATH_EVENTS}?since=x", 400),
        ("GET", f"{names.PATH_EVENTS}?since=-1", 400),
        ("GET", names.PATH_STEER, 400),
        ("GET", f"{names.PATH_STEER}?holder=somebody", 400),
        ("GET", f"{names.PATH_STEER}?holder=somebody&token=t", 409),
        ("POST", names.PATH_LEASE, 400),
        ("POST", names.PATH_STOP, 400),
        ("GET", names.PATH_AGENT, 426),
    ],
)
def test_a_request_without_sense_is_refused(
    live: Live, method: str, path: str, status: int
) -> None:
    """An invalid request with the right secret gets the status of its error.

    An agent that does not send its wire version may have any version, so it is refused.
    """
    assert ask(live, method, path, bearer(live.secret))[0] == status


def test_the_token_of_monitors(live: Live) -> None:
    """The token of monitors permits the report of a health event, and nothing else."""
    token = live.run.directory.monitor_token()
    assert (live.run.directory.path / names.MONITOR_FILE).stat().st_mode & 0o777 == 0o600
    status, answer = ask(live, "POST", names.PATH_HEALTH_EVENTS, bearer(token))
    assert status == 400
    assert b"the request is invalid" in answer
    for path in (names.PATH_JOB, names.PATH_SPEC, names.PATH_EVENTS, names.PATH_AGENT):
        assert ask(live, "GET", path, bearer(token))[0] == 401
    for path in (names.PATH_STOP, names.PATH_DRAIN, names.PATH_INJECT):
        assert ask(live, "POST", path, bearer(token))[0] == 401


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("drain", "job", "--node", "7"), "the job has no node 7; its nodes are 0 to 0"),
        (("drain", "job", "--node", "0"), "no rank has reached a Session yet"),
        (("drain", "job", "--node", "0", "--deadline", "-1"), "a deadline of -1 s is invalid"),
        (
            ("report-fault", "job", "--host", "elsewhere", "--source", "notice", "spot"),
            "the job has no node on host elsewhere now",
        ),
    ],
    ids=["node", "session", "deadline", "host"],
)
def test_a_move_that_is_impossible(live: Live, options: tuple[str, ...], text: str) -> None:
    """The command ends with status 1 and one line that says why."""
    command = [sys.executable, "-m", "rekindle.cli.main", *options]
    ended = run_command(command, env=live.place.environment())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert text in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_job_is_steered_by_one(live: Live) -> None:
    """The launcher has the lease; the error of a second holder names the launcher."""
    client = JobClient(live.where, live.secret)
    with pytest.raises(LeaseHeldError, match=f"rekindle run .process {live.run.process.pid}"):
        client.steer(holder="somebody else", token="other")
    with pytest.raises(JobError, match="401"):
        JobClient(live.where, "guess").status()


def hello(live: Live, **changes: object) -> p.Hello:
    """Return the first message of an agent of this job."""
    good = p.Hello(
        job_id="job",
        attempt=live.where.attempt,
        version=names.WIRE_VERSION,
        node=-1,
        address=names.LOOPBACK,
        pid=1,
        processes=2,
    )
    return msgspec.structs.replace(good, **changes)


async def talk(live: Live, *frames: bytes | str) -> list[object]:
    """Send frames on an agent's connection; return the answers, then its close code."""
    url = f"http://{live.where.host}:{live.where.port}{names.PATH_AGENT}"
    answers: list[object] = []
    headers = {
        "Authorization": bearer(live.secret),
        names.HEADER_WIRE: str(names.WIRE_VERSION),
    }
    async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(url) as line:
        for frame in frames:
            await (line.send_str(frame) if isinstance(frame, str) else line.send_bytes(frame))
        while (
            answer := await asyncio.wait_for(line.receive(), bound_s())
        ).type is WSMsgType.BINARY:
            answers.append(p.decode_to_agent(answer.data))
            if isinstance(answers[-1], p.EndAgent):
                return answers
        return [*answers, line.close_code]


GARBAGE: dict[str, Callable[[], bytes | str]] = {
    "nothing": lambda: b"",
    "noise": lambda: bytes(range(256)) * 40,
    "text": lambda: "hello",
    "json": lambda: json.dumps({"type": "hello"}),
    "unknown message": lambda: msgspec.msgpack.encode({"type": "unheard-of"}),
    "a message of the other direction": lambda: p.encode(p.EndAgent(status=0)),
    "a truncated message": lambda: p.encode(p.StoreDown(serial=1))[:-1],
    "news before a hello": lambda: p.encode(p.StoreDown(serial=1)),
    "an exit before a hello": lambda: p.encode(
        p.Exited(rank=0, pid=1, exit=p.Exit(signal=9), finished=0)
    ),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_on_an_agents_line_closes_it(live: Live, what: str) -> None:
    """The coordinator closes the connection with status 1008; the job's state does not change."""
    assert asyncio.run(talk(live, GARBAGE[what]())) == [1008]
    assert live.state() == live.before
    assert (
        " WARNING coordinator: the coordinator closed the connection of an agent: "
        in live.run.stderr
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attempt": 7}, "attempt is 7, the job's is 0"),
        ({"job_id": "another"}, "job is 'another', the job's is 'job'"),
        ({"version": 99}, "wire version is 99"),
        ({"processes": 3}, "processes per node is 3"),
        ({"node": 0}, "another agent is node 0"),
        ({"node": 1}, "node rank 1 does not exist"),
    ],
    ids=str,
)
def test_an_agent_that_does_not_belong_is_refused(
    live: Live, changes: dict[str, object], words: str
) -> None:
    """The refusal of an agent has the reason, for example an old attempt."""
    [answer] = asyncio.run(talk(live, p.encode(hello(live, **changes))))
    assert isinstance(answer, p.EndAgent)
    assert words in answer.refused


OTHER_VERSION = """
import sys
from rekindle import names
names.WIRE_VERSION = 99
from rekindle.agent import process
sys.exit(process.main())
"""


def start_agent(
    live: Live, secret: str, *options: str, code: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run an agent process or another program for the job, to its end."""
    where = f"{live.where.host}:{live.where.port}"
    program = ["-c", code] if code else ["-m", "rekindle.agent.process"]
    command = [sys.executable, *program, "--coordinator", where, *options]
    command += ["--directory", str(live.run.directory.path)]
    environment = live.place.environment({names.ENV_SECRET: secret})
    return run_command(command, env=environment)


def test_an_agent_of_another_version_ends(live: Live) -> None:
    """The error of an agent of another version has both versions; the agent decodes no message."""
    ended = start_agent(live, live.secret, code=OTHER_VERSION)
    assert ended.returncode == 1
    words = f"has wire version {names.WIRE_VERSION}, this agent 99; install the same version"
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "because its wire version is '99'" in live.run.stderr
    assert live.state() == live.before


def test_an_agent_with_a_wrong_secret_ends(live: Live) -> None:
    """The error names the job and the variable for its secret; there is no traceback."""
    ended = start_agent(live, "wrong")
    assert ended.returncode == 1
    assert "refuses this job secret; give the one of job job in REKINDLE_SECRET" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_agent_of_an_old_attempt_ends(live: Live) -> None:
    """An agent process of an old attempt is refused and ends."""
    ended = start_agent(live, live.secret, "--attempt", "6")
    assert ended.returncode == 1
    assert "refused this agent: the agent's attempt is 6" in ended.stderr


def test_a_spare_tells_what_mindclusters_switch_says(place: Place) -> None:
    """The coordinator accepts MindCluster's switch from a spare, because it is for the whole job.

    It accepts other messages only from nodes of the job.
    """
    live = Live(place)
    message = p.encode(p.ProfilingSwitchRead(switch=switch_of(("step",))))
    more = p.encode(p.StoreDown(serial=1))
    answers = asyncio.run(talk(live, p.encode(hello(live, spare=True)), message, more))
    assert answers[-1] == 1008
    (place.folder / "go").touch()
    live.run.end(0)
    assert [event.by for event in live.run.events_of(journal.Profiled)] == ["data-trace"]


@pytest.mark.parametrize(
    ("secret", "status", "words"),
    [
        ("wrong", 1, f"give the secret of this job in {names.ENV_SECRET}"),
        ("", 2, "set it to the job's secret"),
    ],
)
def test_a_machine_with_a_wrong_secret_cannot_join(
    live: Live, secret: str, status: int, words: str
) -> None:
    """The joining machine prints its mistake, and the job does not change."""
    second = live.place.join(live.run, secret=secret)
    second.process.wait(bound_s())
    assert second.process.returncode == status
    assert words in second.stderr
    assert "Traceback" not in second.stderr
