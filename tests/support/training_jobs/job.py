"""A training job on the local engine: start it, wait for events, and break it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
from waiting import LIMIT_S, bound_s, wait_until

from rekindle.checkpoints.retention import Retention
from rekindle.engines.hosts import SimulatedHosts
from rekindle.engines.local import LocalEngine
from rekindle.job.spec import EntryKind, JobSpec, check, home
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.rank.injection import received
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy
from rekindle.testing.handle import JobHandle
from training_jobs import RANKS
from training_jobs.injection import Fault, reached, release, write_faults
from training_jobs.memory import wait_sealed
from training_jobs.processes import (
    MARK,
    SCRIPT,
    dead,
    environment,
    leads_session,
    marked_processes,
)
from training_jobs.record import Record

STEPS = 24
# For the coordinator, a rank that a test pauses looks like a hung rank.
_POLICY = Policy(hang_timeout_s=LIMIT_S, max_restarts=0)

T = TypeVar("T")


def pause_all(step: int, ranks: int = RANKS, *, life: int = 1) -> list[Fault]:
    """Return the first faults of a job, which pause all ranks in a step until the test is ready."""
    return [Fault(rank, "forward", step, life=life, do="pause") for rank in range(ranks)]


class Job(JobHandle):
    """One job of the training script, as a context manager that ends all its processes.

    `nodes`: the number of simulated nodes, which share `processes`.
    `hosts`: whether nodes have simulated hosts, whose events the engine records.
    `replaces`: whether the job replaces nodes that the coordinator requests.
    `misfit`: additional environment variables of the ranks.
    `script`: a script instead of the training script.
    """

    def __init__(
        self,
        folder: Path,
        *faults: Fault,
        variant: str = "ddp",
        nodes: int = 1,
        processes: int = RANKS,
        spares: int = 0,
        min_nodes: int = 0,
        steps: int = STEPS,
        snapshot_every: int = 5,
        checkpoint_every: int = 0,
        keep: Retention = Retention(),  # noqa: B008
        policy: Policy = _POLICY,
        hosts: bool = False,
        replaces: bool = True,
        checkpoint_store: str = "",
        misfit: dict[str, str] | None = None,
        script: Path | None = None,
    ) -> None:
        super().__init__(folder / "job", limit_s=bound_s())
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.record = Record(folder, steps, ranks=processes)
        self.replaces = replaces
        self.hosts = SimulatedHosts(home()) if hosts else None
        self.spec = JobSpec(
            job_id="job",
            entry=EntryKind.SCRIPT,
            target=str(script or SCRIPT),
            arguments=(str(folder), "--variant", variant, "--steps", str(steps)),
            nodes=nodes,
            processes_per_node=processes // nodes,
            spares=spares,
            min_nodes=min_nodes,
            environment=environment(self.mark) | (misfit or {}),
            working_directory=str(folder),
            directory=str(folder / "job"),
            log_directory=str(folder / "job" / "logs"),
            checkpoint_store=checkpoint_store or str(folder / "job" / "checkpoints"),
            snapshot_every=snapshot_every,
            checkpoint_every=checkpoint_every,
            keep=keep,
            allow_injection=True,
            policy=policy,
        )
        self.engine: LocalEngine | None = None
        self._attempt = -1
        self._wanted = 0  # number of journal events that were searched for requested nodes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._node_killed = False
        self.plan(*faults)

    @property
    def journal_of_ranks(self) -> Path | None:
        """The file that the coordinator writes; None: the ranks cannot read it."""
        return self.directory.journal_file

    def plan(self, *faults: Fault) -> None:
        """Set the faults that the ranks cause."""
        self.faults = list(faults)
        write_faults(self.folder, self.faults, journal=self.journal_of_ranks)

    def plan_more(self, *faults: Fault) -> int:
        """Add faults and return the number of the first. Earlier faults no longer occur."""
        for number, fault in enumerate(self.faults):
            if not reached(self.folder, number).exists():
                self.faults[number] = dataclasses.replace(fault, life=-1)
        self.faults += faults
        write_faults(self.folder, self.faults, keep=True, journal=self.journal_of_ranks)
        return len(self.faults) - len(faults)

    # ---- start and end

    def start(self, **changes: object) -> Job:
        """Launch the job, or its next attempt, with changes of its spec."""
        self._reap()
        self._attempt += 1
        self.spec = msgspec.structs.replace(self.spec, **changes)
        self.directory.create(check(self.spec))
        self._wanted = len(self.events())
        os.environ[MARK] = self.mark
        try:
            self.engine = LocalEngine(self.directory, hosts=self.hosts)
            self.endpoint = self.engine.launch(attempt=self._attempt)
        finally:
            del os.environ[MARK]
        return self

    def has_ended(self) -> bool:
        """Return whether the coordinator has ended."""
        return self.coordinator.poll() is not None

    def end(self, limit_s: float = LIMIT_S) -> journal.Ended:
        """Wait until the job and all its processes have ended, and return the last end."""
        self.wait(self.has_ended, "the coordinator's end", limit_s)
        ended = self.events_of(journal.Ended)
        assert ended, f"the coordinator ended without a word{self.story()}"
        for process in self._all_processes():
            process.wait(bound_s())
        return ended[-1]

    def __enter__(self) -> Job:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for process in self._all_processes():
            if process.poll() is None:
                process.kill()
        self._reap()
        wait_until(lambda: not marked_processes(self.mark), "all processes of the job gone")

    def _reap(self) -> None:
        for process in self._all_processes():
            process.wait(bound_s())
        self._processes = []
        self.engine = None

    def _all_processes(self) -> list[subprocess.Popen[bytes]]:
        if self.engine is None:
            return self._processes
        own = [self.engine.coordinator, *self.engine.agents]
        return [*self._processes, *(process for process in own if process is not None)]

    # ---- waits

    def wait(self, true: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
        """Wait until `true()`, and start requested nodes during this time."""
        return self.wait_until(true, what, bound_s(limit_s), past_end=True)

    def wait_fault(self, number: int) -> None:
        """Wait until the injected fault `number` occurs."""
        mark = reached(self.folder, number)
        fault = f"fault {number}: {self.faults[number]}"
        self.wait(lambda: mark.exists() or self.coordinator.poll() in (0, 1), fault)
        assert mark.exists(), f"ended before fault {number}{self.story()}"

    def wait_pause(self, step: int, first: int = 0) -> None:
        """Wait until the faults from `first` pause all ranks in `step`.

        Also wait until the coordinator knows of the step, and the agents have sealed all snapshots.
        """
        for number in range(first, first + self.record.ranks):
            self.wait_fault(number)
        self.wait(lambda: self.status().finished == step, f"the coordinator's word of step {step}")
        for node in range(self.spec.nodes):
            wait_sealed(self.agent_pid(node))

    def copies(self) -> dict[int, tuple[int, ...]]:
        """Return the steps of the copies of each rank's snapshots, as known to the coordinator."""
        return {r: steps for node in self.status().nodes for r, steps in node.copies.items()}

    def wait_copies(self, step: int, *ranks: int) -> None:
        """Wait until the coordinator knows of copies of these ranks' snapshots after `step`."""

        def known() -> bool:
            copies = self.copies()
            return all(step in copies.get(rank, ()) for rank in ranks)

        self.wait(known, f"copies of ranks {ranks} after step {step}")

    def release_all(self, first: int = 0) -> None:
        """Let all ranks continue from the pauses that start at fault `first`."""
        for number in range(first, first + self.record.ranks):
            self.release(number)

    def release(self, number: int) -> None:
        """Let a rank that pauses at fault `number` continue."""
        release(self.folder, number)

    def release_abreast(self, number: int, finished: int) -> None:
        """Release fault `number` once all other ranks train and have finished `finished` steps."""
        self.wait_fault(number)
        paused = self.faults[number].rank

        def abreast() -> bool:
            others = [rank for rank in self.status().ranks if rank.rank != paused]
            return all(r.finished >= finished and r.status == "training" for r in others)

        self.wait(abreast, f"{finished} steps of all ranks but {paused}")
        self.release(number)

    def inject_received(
        self, kind: str, *, rank: int, step: int | None, seconds: float = 0.2
    ) -> None:
        """Inject a fault into a rank that trains, and wait until it has received the order."""
        line = received(Inject(rank=rank, kind=InjectionKind(kind), step=step))
        before = self.stderr(rank).count(line)
        self.inject(kind, rank=rank, step=step, seconds=seconds)
        self.wait(lambda: self.stderr(rank).count(line) > before, line)

    def inject_held(self, number: int, kind: str, *, rank: int, step: int | None) -> None:
        """Inject a fault while fault `number` pauses the job. Then release the job.

        The rank has the order before the release. Otherwise the order could arrive too late.
        """
        self.wait_fault(number)
        self.inject_received(kind, rank=rank, step=step)
        self.release(number)

    def _tend(self) -> None:
        if self.engine is None:
            return
        events = self.events()
        new, self._wanted = events[self._wanted :], len(events)
        for event in new if self.replaces else ():
            self.engine.learn(event)
            if isinstance(event, journal.NodeWanted):
                self.bring(event.node)

    def bring(self, node: int) -> None:
        """Start an agent that replaces a lost one."""
        assert self.engine is not None
        os.environ[MARK] = self.mark
        try:
            self.engine.replace(node)
        finally:
            del os.environ[MARK]

    # ---- state

    @property
    def coordinator(self) -> subprocess.Popen[bytes]:
        """The coordinator's process."""
        assert self.engine is not None
        assert self.engine.coordinator is not None
        return self.engine.coordinator

    def agent_pid(self, node: int) -> int:
        """Return the process id of a node's agent."""
        self.wait_event(journal.NodeJoined, node=node)
        return self.events_of(journal.NodeJoined, node=node)[-1].pid

    def leftovers(self) -> list[str]:
        """Return the live processes of the job.

        The fork server of a killed node ends on its own.
        """
        if self._node_killed:
            wait_until(
                lambda: not marked_processes(self.mark), "the end of a killed node's fork server"
            )
        return marked_processes(self.mark)

    def stderr(self, rank: int) -> str:
        """Return the standard error of all processes of a rank."""
        logs = Path(self.spec.log_directory).glob(f"attempt_*/{rank}/stderr.log")
        return "".join(log.read_text() for log in sorted(logs))

    def checkpoints(self) -> list[Path]:
        """Return the directories of the checkpoints, newest first."""
        return sorted(Path(self.spec.checkpoint_store).glob("step-*"), reverse=True)

    def story(self) -> str:
        """Return the newest events, logs, steps, processes and stacks, for a failed test."""
        ranks = range(self.record.ranks)
        steps = {rank: max(self.record.steps(rank), default=None) for rank in ranks}
        texts = [super().story(), f"\nlast steps logged: {steps}"]
        return "\n".join([*texts, *marked_processes(self.mark), *self._stacks()])

    def _stacks(self) -> list[str]:
        """Let all live ranks write their stacks, and return the stacks."""
        texts = []
        for path in sorted(self.folder.glob("stack.*")):
            try:
                os.kill(int(path.suffix[1:]), signal.SIGUSR2)
                wait_until(lambda path=path: path.stat().st_size, "a stack", 2.0)
            except (ProcessLookupError, AssertionError):
                continue  # it has ended or does not answer
            texts += [f"\n---- {path.name}", path.read_text()]
        return texts

    # ---- faults

    def profile(self, kinds: str = "", *, on: bool = True) -> None:
        """Switch light profiling while all ranks pause; wait until they have received it.

        A rank receives orders in sequence, so it has the switch when it has a later order.
        """
        self.client().profile(ProfilingOrder(on=on, kinds=tuple(kinds.split()), by="test"))
        for rank in range(self.record.ranks):
            self.inject_received("slow", rank=rank, step=None, seconds=0.0)

    def kill_pid(self, pid: int) -> None:
        """Kill a process of the job and wait for its end."""
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not psutil.pid_exists(pid), f"the end of process {pid}")

    def kill_coordinator(self) -> None:
        """Kill the coordinator and wait for its end."""
        self._processes.append(self.coordinator)
        self.coordinator.kill()
        self.coordinator.wait(bound_s())

    def lose_coordinator(self) -> int:
        """Wait until the coordinator has ended on its own. Return its exit status."""
        self._processes.append(self.coordinator)
        return self.coordinator.wait(bound_s())

    def revive_coordinator(self, more: Mapping[str, str] = {}) -> None:
        """Start a coordinator that replaces the ended one, with `more` environment variables."""
        assert self.engine is not None
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {MARK: self.mark, **more}.items():
                patch.setenv(name, value)
            self.endpoint = self.engine.revive()

    def kill_node(self, *nodes: int) -> None:
        """Kill the agents of these nodes. The kernel then kills their ranks; wait for this.

        The fork servers continue for a moment, to end the processes that the ranks have started.
        """
        agents = [psutil.Process(self.agent_pid(node)) for node in nodes]
        doomed = [child for agent in agents for child in agent.children() if leads_session(child)]
        for agent in agents:
            agent.kill()
        self._node_killed = True
        self.wait(lambda: all(map(dead, agents + doomed)), f"the end of nodes {nodes}")
