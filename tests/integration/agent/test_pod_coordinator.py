"""The coordinator of a pod continues after attempts, signals, and the loss of its volume."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from broken import Bug
from waiting import bound_s, status_of, wait_until

from rekindle import names
from rekindle.coordinator.machine.stragglers import ProfilingSwitch
from rekindle.engines.client import JobClient
from rekindle.errors import JobError, LeaseHeldError, UnansweredError, UnexpectedError, UsageError
from rekindle.job.spec import Endpoint, EntryKind, JobDirectory, JobSpec
from rekindle.profiling.switch import ProfilingOrder
from rekindle.recovery.journal import journal
from rekindle.supervised import reports_in

SECRET = "s" * 64


def free_port() -> int:
    """Return a free port outside the range that the kernel uses for connections.

    Several coordinators of a test bind this port one after the other.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server((names.LOOPBACK, port)):
            return port
    raise AssertionError("no port is free")


class Pod:
    """A coordinator that runs as in a Kubernetes pod."""

    def __init__(self, folder: Path, fault_tables: str = "") -> None:
        self.folder, self.port = folder, free_port()
        self.directory = JobDirectory(folder / "volume")
        described = folder / "described"
        described.mkdir()
        spec = JobSpec(
            job_id="job",
            entry=EntryKind.SCRIPT,
            target="/in/the/image.py",
            working_directory="/in/the",
            directory="/elsewhere",
            log_directory="/elsewhere/logs",
            checkpoint_store="/elsewhere/checkpoints",
            fault_tables=fault_tables,
        )
        (described / names.SPEC_FILE).write_bytes(msgspec.json.encode(spec))
        (described / names.SECRET_FILE).write_text(SECRET)
        endpoint = Endpoint(host=names.LOOPBACK, port=self.port, pid=0, attempt=0)
        self.client = JobClient(endpoint, SECRET)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Pod:
        command = [sys.executable, "-m", "rekindle.coordinator.pod_process"]
        command += ["--directory", str(self.directory.path)]
        command += ["--described", str(self.folder / "described"), "--port", str(self.port)]
        self.process = subprocess.Popen(command)
        self.wait(lambda: self.client.history() is not None)
        return self

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until a condition holds; repeat requests that the coordinator does not answer."""

        def is_so() -> bool:
            with contextlib.suppress(JobError):
                return done()
            return False

        wait_until(is_so, "what the coordinator is asked for")

    def wait_attempt(self, attempt: int) -> None:
        self.wait(lambda: self.client.status().attempt == attempt)

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        return process.wait(bound_s())

    def begin(self, attempt: int, history: list[journal.AnyEvent] | None = None) -> None:
        self.client.begin(attempt, history or [])
        self.wait_attempt(attempt)

    def stop(self) -> list[journal.AnyEvent]:
        self.client.stop(by="somebody")
        self.wait(lambda: isinstance(self.client.history()[-1], journal.Ended))
        self.wait(self.is_between)
        return self.client.history()

    def is_between(self) -> bool:
        try:
            self.client.status()
        except JobError as error:
            return "503" in str(error)
        return False


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    if made.process is not None:
        made.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """A coordinator between attempts; its tests do not start one."""
    made = Pod(tmp_path_factory.mktemp("pod"))
    yield made.start()
    if made.process is not None:
        made.end(signal.SIGKILL)


def test_attempts_one_after_the_other(pod: Pod) -> None:
    """The coordinator serves the journal between attempts, and the next attempt extends it."""
    pod.start()
    assert pod.is_between()
    pod.begin(1)
    first = pod.stop()
    pod.begin(2)
    second = pod.stop()
    assert second[: len(first)] == first
    assert [e.attempt for e in second if isinstance(e, journal.JobStarted)] == [1, 2]
    assert pod.client.history(since=len(first)) == second[len(first) :]


def test_wrong_tables_of_faults(tmp_path: Path) -> None:
    """With an invalid fault table no attempt starts, and the error names the line.

    After the file is corrected, an attempt starts.
    """
    tables = tmp_path / "own.toml"
    tables.write_text("[[exit]]\ncodes = [77]\nkind = 'transient'\n")
    pod = Pod(tmp_path, str(tables)).start()
    try:
        with pytest.raises(UsageError, match=r"own.toml:1: .* says"):
            pod.client.begin(1, [])
        assert pod.is_between()
        tables.write_text(tables.read_text() + "says = 'once more'\n")
        pod.begin(1)
    finally:
        pod.end(signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_end_is_not_the_end_of_the_job(number: int, pod: Pod) -> None:
    """After SIGTERM or SIGKILL a new coordinator process in the pod continues the attempt."""
    pod.start().begin(1)
    before = pod.client.history()
    pod.end(number)
    pod.start()
    pod.wait_attempt(1)
    assert pod.client.history()[: len(before)] == before
    assert not any(isinstance(e, journal.Ended) for e in pod.client.history())


def test_a_bug_is_not_the_end_of_the_job(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bug the process reports it and ends; the next one continues the attempt."""
    bug = Bug(pod.folder, ProfilingSwitch.switch)
    for name, value in bug.environment.items():
        monkeypatch.setenv(name, value)
    pod.start().begin(1)
    before = pod.client.history()
    bug.begin()
    with pytest.raises(UnansweredError):
        pod.client.profile(ProfilingOrder(on=True))
    assert pod.process is not None
    assert status_of(pod.process) == UnexpectedError.exit_status
    [(_, error)] = reports_in(pod.directory.path)
    assert error == "KeyError('a bug of the test')"
    pod.start()
    pod.wait_attempt(1)
    pod.client.profile(ProfilingOrder(on=True))
    assert pod.client.history()[: len(before)] == before


def test_a_lost_volume(pod: Pod) -> None:
    """After the volume is lost, a client sends its copy of the journal; the attempt continues."""
    pod.start().begin(1)
    copy = pod.client.history()
    pod.end(signal.SIGKILL)
    pod.directory.journal_file.unlink()
    pod.start()
    assert pod.is_between()
    pod.begin(1, copy)
    assert pod.client.history()[: len(copy)] == copy
    assert len([e for e in pod.client.history() if isinstance(e, journal.JobStarted)]) == 1


def test_an_attempt_that_is_over(pod: Pod) -> None:
    pod.start().begin(1)
    pod.stop()
    for attempt in (0, 1):
        with pytest.raises(LeaseHeldError, match=f"attempt {attempt} is over; the next one is 2"):
            pod.client.begin(attempt, [])
    assert pod.is_between()


def test_a_copy_that_is_older_than_the_journal(pod: Pod) -> None:
    """If the client's copy of the journal is older, the coordinator keeps its own journal."""
    pod.start().begin(1)
    known = pod.stop()
    pod.begin(2, known[:1])
    assert pod.client.history()[: len(known)] == known


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "the request is invalid"),
        (b'{"attempt": "x"}', "Expected `int`"),
        (b'{"attempt": 1, "journal": "a\\nb\\n"}', "line 1 of the job's journal"),
        (b'{"attempt": 1, "more": 2}', "unknown field `more`"),
    ],
)
def test_orders_that_are_none(body: bytes, expected: str, waiting: Pod) -> None:
    """The coordinator refuses invalid requests with status 400; no attempt starts."""
    status, text = ask(waiting, "POST", names.PATH_ATTEMPT, body)
    assert (status, expected in text) == (400, True), text
    assert waiting.is_between()


@pytest.mark.parametrize("path", [names.PATH_EVENTS + "?follow=0", names.PATH_JOB, "/"])
def test_the_secret_is_asked_for(path: str, waiting: Pod) -> None:
    """The coordinator answers 401 to a request without the right secret.

    A second header has the secret if a proxy does not forward the Authorization header.
    """
    assert ask(waiting, "GET", path, secret="")[0] == 401
    assert ask(waiting, "GET", path, secret="wrong")[0] == 401
    assert ask(waiting, "GET", path, header=names.HEADER_SECRET)[0] in (200, 503)


def ask(
    pod: Pod,
    method: str,
    path: str,
    body: bytes = b"",
    secret: str = SECRET,
    header: str = "Authorization",
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(names.LOOPBACK, pod.port, timeout=bound_s())
    try:
        connection.request(method, path, body, {header: f"Bearer {secret}"} if secret else {})
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b'{"error": ""}').get("error", "")
    finally:
        connection.close()


def test_nothing_is_mounted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rekindle.coordinator.pod_process", "--port", "0"]
    command += ["--directory", str(tmp_path / "a"), "--described", str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "no job in" in done.stderr) == (2, True), done.stderr
