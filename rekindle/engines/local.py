"""Run a job on this machine: coordinator and agents are processes.

The engine simulates any number of nodes: each node is one agent with its ranks. In the foreground
(`rekindle run`) the processes end with their launcher. Otherwise only the end of the job ends them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from rekindle import names
from rekindle.console import say
from rekindle.engines.client import ANSWER_S, JobClient
from rekindle.engines.devices import JobDevices
from rekindle.engines.hosts import HostLog, SimulatedHosts
from rekindle.errors import JobError, OtherVersionError, PortTakenError, UsageError
from rekindle.job.journal_reader import events_in
from rekindle.job.spec import Endpoint, JobDirectory, JobSpec, KeepsOff, home
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.journal import attempts
from rekindle.recovery.journal.host_history import learned_from
from rekindle.recovery.journal.journal import AnyEvent
from rekindle.recovery.journal.node_events import NodeJoined
from rekindle.waiting import retry

EXIT_S = 10.0  # time that a coordinator may take to end after the end of its launcher
FREE_S = 5.0  # time that the kernel may take to free the port of a failed coordinator
COORDINATOR = "rekindle.coordinator.process"  # the module that a coordinator runs
_AGENT = "rekindle.agent.process"
_DIRECTORY = "--directory"
_PROC = Path("/proc")


class LocalEngine:
    """Places a job on this machine.

    directory: of the job.

    foreground: the processes write to the launcher's streams and end with it.

    listen: (host, port) of the coordinator; port 0: any free one.

    nodes: the node ranks that this machine runs; None: all of the job, and its spares.

    address: the address of this machine's ranks for the ranks of other nodes.

    hosts: the simulated hosts of the nodes; None: this machine is the host of all nodes here. The
    engine starts no agent here once a job has isolated the machine.
    """

    def __init__(
        self,
        directory: JobDirectory,
        *,
        foreground: bool = False,
        listen: tuple[str, int] = (names.LOOPBACK, 0),
        nodes: Sequence[int] | None = None,
        address: str = names.LOOPBACK,
        hosts: SimulatedHosts | None = None,
    ) -> None:
        self.directory = directory
        self._listen = listen
        spec = directory.spec()
        self._job_id = spec.job_id
        every = (*range(spec.nodes), names.SPARE)
        self._nodes = every if nodes is None else tuple(nodes)
        self._address = address
        self._hosts = hosts
        alone = nodes is not None or spec.keeps_off is KeepsOff.ONE_HOST
        self._machine = socket.gethostname() if hosts is None and alone else ""
        self._log_of_hosts = HostLog(home())
        self._devices = JobDevices(home(), spec.job_id, directory.devices())
        self._foreground = foreground
        self._listener: socket.socket | None = None  # of the coordinator that starts next
        self._endpoint: Endpoint | None = None
        self._lifeline: tuple[int, int] | None = os.pipe() if foreground else None
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.agents: list[subprocess.Popen[bytes]] = []
        self._on_the_way: dict[int, subprocess.Popen[bytes]] = {}  # by node: not joined yet

    def launch(self, *, attempt: int) -> Endpoint:
        """Start the coordinator, one agent per node, and the spares.

        The coordinator of an earlier attempt ends first: by itself if it answers, otherwise the
        engine ends it. Raises UsageError: the coordinator's port is taken, there are too few hosts,
        or the user's own table of faults has a bad entry. Raises JobError: the job still runs.
        Raises DevicesHeldError: another job holds a device.
        """
        spec = self.directory.spec()
        with self._devices.held():
            if self._listener is None:
                self.prepare()
            self._endpoint = self._start_coordinator(self._listen, attempt)
            self._on_the_way.clear()  # agents of an earlier attempt end
            for node in (*range(spec.nodes), *(names.SPARE,) * spec.spares):
                self.replace(node)
        return self._endpoint

    def prepare(self) -> None:
        """Check that the next launch is possible, and listen for it. Agents may connect from now.

        The coordinator of an earlier attempt ends first. Raises as `launch` does; PortTakenError:
        another process has the coordinator's port.
        """
        spec = self.directory.spec()
        if spec.fault_tables:
            Tables.load(Path(spec.fault_tables))
        if self._hosts is not None:
            self._hosts.require(spec.nodes, self._log_of_hosts.hosts())
        elif spec.keeps_off is KeepsOff.ONE_HOST and (reason := self._isolated()):
            raise UsageError(
                f"this machine is isolated ({reason}), and the job has no other one; after its "
                f"repair run rekindle release-node {self._machine}"
            )
        self._wait_for_end(spec)
        end_coordinators(self.directory.path)
        self._listener = listen(*self._listen)

    def leave(self) -> None:
        """Close the port of a launch that `prepare` has prepared, and that does not happen."""
        if self._listener is not None:
            self._listener.close()

    def _wait_for_end(self, spec: JobSpec) -> None:
        """Wait while a coordinator of the job answers. Raises JobError: it does not end."""
        began = time.monotonic()
        while found := self.alive():
            stopping = attempts.is_stopping(self.history())
            limit_s = EXIT_S + (spec.policy.dump_timeout_s if stopping else 0.0)
            if time.monotonic() - began > limit_s:
                raise JobError(
                    f"job {spec.job_id} runs already (its coordinator is process {found.pid}); "
                    f"stop it with `rekindle stop {spec.job_id}`, or choose another job id"
                )
            time.sleep(0.05)

    def revive(self) -> Endpoint:
        """Start another coordinator at the address of the failed one; its agents reconnect to it.

        The failed coordinator may still live, and hang. It ends first, because it has the port and
        the lock on the journal. Raises JobError: the job was never launched, or the failed
        coordinator does not end. Raises UsageError: another process took the port.
        """
        dead = self.directory.endpoint()
        if dead is None:
            raise JobError(f"the job in {self.directory.path} has not been launched")
        agents = ["-m", _AGENT, _DIRECTORY, str(self.directory.path)]
        if dead.wire != names.WIRE_VERSION and any(_running(agents)):
            what = f"job {self._job_id} has lost its coordinator, and each of its agents"
            raise OtherVersionError.of(what, dead.wire, names.WIRE_VERSION)
        end_coordinators(self.directory.path)
        if self.coordinator is not None:
            self.coordinator.poll()  # a child that has ended stays until its parent asks for it
        host = self._listen[0] if self._endpoint else dead.host
        start = functools.partial(self._start_coordinator, (host, dead.port), dead.attempt)
        # The kernel closes the connections of the failed coordinator one after another. So its port
        # may not be free yet.
        self._endpoint = retry(start, UsageError, FREE_S, 0.02)
        return self._endpoint

    def _start_coordinator(self, address: tuple[str, int], attempt: int) -> Endpoint:
        listener, self._listener = self._listener or listen(*address), None
        host, port = listener.getsockname()[:2]
        # This write precedes the coordinator's start: the next launcher must find the address, even
        # if this process is killed in the next line.
        endpoint = Endpoint(host=_reachable(host), port=port, pid=0, attempt=attempt)
        with listener:
            self._announce(endpoint)
            handle = listener.fileno()
            arguments = ["--attempt", str(attempt), "--listen-fd", str(handle)]
            arguments = [*command(self.directory.path), *arguments]
            self.coordinator = self._start("coordinator", arguments, [handle])
        return msgspec.structs.replace(endpoint, pid=self.coordinator.pid)

    def _announce(self, endpoint: Endpoint) -> None:
        """Write the address, unless the file has it already: a full disk does not end a job."""
        known = self.directory.endpoint()
        if known is None or (known.host, known.port) != (endpoint.host, endpoint.port):
            self.directory.announce(endpoint)
            return
        try:
            self.directory.announce(endpoint)
        except OSError as error:
            say(f"Rekindle cannot write the address of the job's coordinator: {error}")

    def alive(self, *, limit_s: float = ANSWER_S) -> Endpoint | None:
        """Return the address of the job's coordinator if it runs and answers within the limit."""
        endpoint = self.directory.endpoint()
        if endpoint is None:
            return None
        try:
            status = self.client(endpoint).status(limit_s=limit_s)
        except OtherVersionError:
            raise  # it lives
        except JobError:
            return None
        found = msgspec.structs.replace(endpoint, wire=status.wire)
        return found if status.job_id == self._job_id else None

    def history(self) -> list[AnyEvent]:
        """Read the journal, which the coordinator writes on this machine."""
        return events_in(self.directory.journal_file)

    def client(self, endpoint: Endpoint) -> JobClient:
        """Return a client of the job's coordinator."""
        return JobClient(endpoint, self.directory.secret())

    def watch(
        self, report: Callable[[HealthEvent], None], tell: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect: agents' connections and the kernel report everything."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Kill the agents that are stopped, because they cannot read that the job has ended.

        Other agents end on their own. The job's directory stays: it is the record of the job.
        Raises JobError: an agent does not end.
        """
        words = ["-m", _AGENT, _DIRECTORY, str(self.directory.path)]
        for pid in _running(words):
            if _is_stopped(pid):
                _end(pid, words, "an agent of the ended job")

    def replace(self, node: int) -> None:
        """Start an agent for this node rank (names.SPARE: a spare), if this machine runs that node.

        An agent that this engine started for the node may be on its way. Then it starts no other,
        unless that agent is stopped (SIGSTOP).
        Raises JobError: the job has no coordinator, no host is free, or another job holds a device.
        """
        before = self._on_the_way.get(node)
        if before is not None and _is_stopped(before.pid):
            before.kill()
            before.wait()
        if node not in self._nodes or (before is not None and before.poll() is None):
            return
        endpoint = self._endpoint or self.directory.endpoint()
        if endpoint is None:
            raise JobError(f"the job in {self.directory.path} has not been launched")
        if reason := self._isolated():
            raise JobError(
                f"this machine is isolated ({reason}), so the node needs another machine"
            )
        spare = node == names.SPARE
        arguments = [
            *("-m", _AGENT, _DIRECTORY, str(self.directory.path)),
            *("--attempt", str(endpoint.attempt)),
            *(("--spare",) if spare else ("--node", str(node))),
            *("--coordinator", f"{endpoint.host}:{endpoint.port}"),
            *("--address", self._address),
        ]
        with contextlib.ExitStack() as kept:
            fds = [*kept.enter_context(self._devices.held())]
            if self._hosts is not None:
                host, handle = self._hosts.take(self._log_of_hosts.hosts())
                kept.callback(os.close, handle)
                arguments += ["--simulated-host", str(host)]
                fds.append(handle)
            log = "agent-spare" if spare else f"agent-{node}"
            self.agents.append(self._start(log, arguments, fds))
        if not spare:
            self._on_the_way[node] = self.agents[-1]

    def _isolated(self) -> str:
        """Return why this machine is isolated; empty: it is not, or nodes have simulated hosts."""
        known = self._log_of_hosts.hosts().get(self._machine) if self._machine else None
        return known.isolated if known else ""

    def learn(self, event: AnyEvent) -> None:
        """Record the facts about hosts in an event of the journal. A repeated call does no harm."""
        if isinstance(event, NodeJoined):
            arrived = self._on_the_way.get(event.node)
            if arrived is not None and arrived.pid == event.pid:
                del self._on_the_way[event.node]
        entry = learned_from(self._job_id, event)
        if entry is not None:
            self._log_of_hosts.append(entry)

    def _start(self, log: str, arguments: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
        if self._lifeline is not None:
            arguments = [*arguments, "--lifeline-fd", str(self._lifeline[0])]
            fds = [*fds, self._lifeline[0]]
        with self._log(log) as output:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if output is None else subprocess.STDOUT,
                pass_fds=fds,
                # The launcher passes Ctrl-C on. A cancelled flow kills its process group.
                start_new_session=True,
            )

    def _log(self, name: str) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        if self._foreground:
            return contextlib.nullcontext()
        return Path(self.directory.path, f"{name}.log").open("ab")


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables that are only for this process.

    A secret in it belongs to another job, which this process may join. PREFECT__ variables belong
    to the flow run.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name != names.ENV_SECRET and not name.startswith("PREFECT__")
    }


def listen(host: str, port: int) -> socket.socket:
    """Listen for agents.

    Raises PortTakenError, or another UsageError: the address is not available.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        error_class = PortTakenError if error.errno == errno.EADDRINUSE else UsageError
        raise error_class(
            f"the coordinator cannot listen on {host}:{port}: {error.strerror}; choose another "
            "port, or 0 for any free port"
        ) from error
    return listener


def _reachable(host: str) -> str:
    return names.LOOPBACK if host == "0.0.0.0" else host


def command(directory: Path) -> list[str]:
    """Return the arguments of Python that start a coordinator of the job in this directory."""
    return ["-m", COORDINATOR, _DIRECTORY, str(directory)]


def end_coordinators(directory: Path) -> list[int]:
    """Kill the coordinators of the job in this directory; return their process ids.

    A coordinator that is stopped, or hangs, keeps the job's port and the lock on its journal. A
    killed launcher may have written no process id, so this finds them by their command line.

    Raises JobError: one of them does not end. The text names its process id.
    """
    words = command(directory)
    return [pid for pid in _running(words) if _end(pid, words, "the job's coordinator")]


def _running(words: Sequence[str]) -> Iterator[int]:
    """Yield the ids of the processes whose command line contains these words."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and _runs(int(entry.name), words):
            yield int(entry.name)


def _runs(pid: int, words: Sequence[str]) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        found = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return _contains([os.fsdecode(each) for each in found], words)
    return False


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process; proc(5) has the format."""
    with contextlib.suppress(OSError):  # it has ended
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].startswith(b"T")
    return False


def _contains(words: Sequence[str], part: Sequence[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words)))


def _end(pid: int, words: Sequence[str], what: str) -> bool:
    """Kill a process that runs these words, and wait until it is dead. False: it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        # The handle belongs to one process. The check after it excludes a later process of this id.
        if not _runs(pid, words):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        end = select.poll()
        end.register(handle, select.POLLIN)
        if not end.poll(1000 * names.KILLED_S):
            raise JobError(
                f"{what} (process {pid}) does not answer, and SIGKILL does not end it within "
                f"{names.KILLED_S:g} s; the kernel blocks it, for example in a file system that "
                "hangs"
            )
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise JobError(
            f"{what} (process {pid}) does not answer, and this user may not end it"
        ) from error
    finally:
        os.close(handle)
    return True
