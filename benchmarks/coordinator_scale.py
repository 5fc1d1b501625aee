"""Measure one coordinator with thousands of agents: its load in training, and its notifications.

The coordinator is the product's own process. The agents are simulated (`_scale_agents.py`), with
real connections and real messages, one rank each. Ranks take no time for their work, and the
network is the loopback. So the benchmark measures the coordinator, and the cores that it shares
with the agents.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from _common import Conditions, finish, number, options, place, table
from _scale_agents import Place, Tally, simulate
from _scale_machine import FEWEST, machine_ms

from rekindle import names
from rekindle.engines.local import LocalEngine
from rekindle.job.spec import EntryKind, JobDirectory, JobSpec
from rekindle.protocol.heartbeat_page import beat_interval
from rekindle.recovery.policy.policy import Policy

AGENTS = (1024, 4096, 16384)
TARGET_AGENTS, TARGET_TOLD_MS = 16384, 1000.0
SPARE_FILES = 128  # descriptors in addition to the agents' connections
PER_PROCESS = 4096  # agents in one process of the simulation
SETTLE_S = 2.0
LIMIT_S = 300.0  # for each stage
FAULTS = ("rank killed", "rank killed, all peers fail", "agent cut off")

Regroup = dict[str, float]


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument(
        "--agents",
        type=_sizes,
        metavar="N[,N...]",
        help="sizes to try, 128 or more (default: 1024,4096,16384; quick: 1024)",
    )
    parser.add_argument("--window", type=float, help="seconds of training (default: 20, quick: 5)")
    parser.add_argument("--beat", type=float, help="seconds between beats, instead of the agents'")
    args = parser.parse_args()
    sizes = args.agents or (AGENTS[:1] if args.quick else AGENTS)
    conditions = Conditions()
    result: dict[str, Any] = {}
    for agents in filter(_fits, sizes):
        run = Run(
            agents=agents,
            window_s=args.window or (5.0 if args.quick else 20.0),
            beat_s=args.beat or beat_interval(agents),
            rounds=1 if args.quick else 3,
        )
        with place() as folder:
            result[str(agents)] = run.measure(folder)
        result[str(agents)]["machine_ms"] = machine_ms(agents)
    if not result:
        sys.exit(2)
    _show(result)
    finish(result, conditions, args.json)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(map(int, text.split(",")))
    if min(sizes) < FEWEST:
        raise argparse.ArgumentTypeError(f"{text}: {FEWEST} agents are the least")
    return sizes


def _fits(agents: int) -> bool:
    """Return whether a process may open so many connections. Print the required limit otherwise."""
    needed = agents + SPARE_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return True
    print(
        f"{agents} agents: not measured. The coordinator needs {needed} open files, the hard limit "
        f"is {hard}: raise it (ulimit -Hn {needed} as root, nofile in limits.conf, LimitNOFILE=, "
        "or --ulimit of a container).",
        file=sys.stderr,
    )
    return False


@dataclass(frozen=True)
class Run:
    """One size. window_s: the seconds in which the load of training is measured."""

    agents: int
    window_s: float
    beat_s: float
    rounds: int

    def measure(self, folder: Path) -> dict[str, Any]:
        """Start all, let them train, break them in several ways, and stop them."""
        print(f"{self.agents} agents, a beat every {self.beat_s:g} s", flush=True)
        with ExitStack() as stack:
            job = stack.enter_context(Coordinator(folder, self.agents))
            began = time.monotonic()
            crowd = stack.enter_context(Crowd(self, job))
            crowd.regrouped()
            crowd.step()
            started_s = time.monotonic() - began
            print(f"  all train after {started_s:.1f} s", flush=True)
            time.sleep(SETTLE_S)
            load = self._training(job, crowd)
            faults: dict[str, list[Regroup]] = {kind: [] for kind in FAULTS}
            for turn in range(self.rounds):
                for kind in FAULTS:
                    busy = job.cpu_s()
                    seen = self._break(crowd, kind, turn)
                    faults[kind].append(seen | {"cpu_ms": (job.cpu_s() - busy) * 1000})
                    time.sleep(SETTLE_S)
            peak = job.peak_mb()
        told = [regroup["told_ms"] for seen in faults.values() for regroup in seen]
        return {
            "told_ms": _median(told),
            "told_max_ms": round(max(told), 1),
            "heartbeat_cpu_percent": load["coordinator"],
            "regroup_ms": _median([r["regroup_ms"] for seen in faults.values() for r in seen]),
            "memory_mb": load["memory_mb"],
            "memory_peak_mb": peak,
            "agents_cpu_percent": load["agents"],
            "beat_s": self.beat_s,
            "started_s": round(started_s, 1),
            "faults": {
                kind: {key: _median([r[key] for r in seen]) for key in seen[0]}
                for kind, seen in faults.items()
            },
        }

    def _training(self, job: Coordinator, crowd: Crowd) -> dict[str, float]:
        """Return the CPU use, in percent, of the coordinator and of all agents, while all train."""
        began, busy, theirs = time.monotonic(), job.cpu_s(), crowd.cpu_s()
        time.sleep(self.window_s)
        took = (time.monotonic() - began) / 100
        load = {
            "coordinator": round((job.cpu_s() - busy) / took, 1),
            "agents": round((crowd.cpu_s() - theirs) / took, 1),
            "memory_mb": job.memory_mb(),
        }
        print(f"  training: {load['coordinator']} % of a core", flush=True)
        return load

    def _break(self, crowd: Crowd, kind: str, turn: int) -> Regroup:
        """Cause a fault, and wait until all agents are in training again."""
        node = random.Random(f"{kind} {turn}").randrange(self.agents)
        if kind == "agent cut off":
            crowd.tell("cut", node)
        else:
            crowd.tell("kill", node)
            if kind != "rank killed":
                crowd.tell_all("fail")
        seen = crowd.regrouped()
        fault = max(tally.fault for tally in seen)
        told = [at for tally in seen for at in tally.told]
        assert len(told) == self.agents - (kind == "agent cut off"), f"{len(told)} were told"
        arrived = max(tally.arrived for tally in seen)
        formed = [at for tally in seen for at in tally.formed]
        regroup = {
            "told_ms": (max(told) - fault) * 1000,
            "first_told_ms": (min(told) - fault) * 1000,
            "arrived_ms": (arrived - fault) * 1000,
            "decided_ms": (min(formed) - arrived) * 1000,
            "regroup_ms": (max(formed) - arrived) * 1000,
        }
        crowd.step()
        print(f"  {kind}: all told after {regroup['told_ms']:,.0f} ms", flush=True)
        return regroup


class Coordinator:
    """The coordinator of a job with simulated agents; the end of the `with` block ends it."""

    def __init__(self, folder: Path, agents: int) -> None:
        self.directory = JobDirectory(folder / "job")
        spec = JobSpec(
            job_id="scale",
            entry=EntryKind.SCRIPT,
            target="train.py",
            nodes=agents,
            working_directory=str(folder),
            directory=str(folder / "job"),
            log_directory=str(folder / "job" / names.LOGS_DIRECTORY),
            checkpoint_store=str(folder / "job" / names.CHECKPOINT_DIRECTORY),
            policy=Policy(max_recoveries=1000),
        )
        self.directory.create(spec)
        self._engine = LocalEngine(self.directory, nodes=())
        self.port = self._engine.launch(attempt=0).port
        assert self._engine.coordinator is not None
        self._process = psutil.Process(self._engine.coordinator.pid)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._engine.coordinator is not None
        self._engine.coordinator.kill()
        self._engine.coordinator.wait()
        if error is not None:
            print((self.directory.path / "coordinator.log").read_text()[-4000:], file=sys.stderr)

    def cpu_s(self) -> float:
        """Return the CPU seconds so far."""
        return _cpu_s(self._process)

    def memory_mb(self) -> float:
        """Return the current memory of the process, in MB."""
        return round(self._process.memory_info().rss / 1e6, 1)

    def peak_mb(self) -> float:
        """Return the peak memory of the process, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return round(int(line.split()[1]) * 1024 / 1e6, 1)

    def stop(self) -> None:
        """Stop the job as its launcher does."""
        assert self._engine.coordinator is not None
        self._process.terminate()
        try:
            self._engine.coordinator.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the coordinator did not stop within {LIMIT_S:g} s") from None


class Crowd:
    """The processes of the simulated agents; the end of the `with` block stops the job."""

    def __init__(self, run: Run, job: Coordinator) -> None:
        self._job = job
        self._share = -(-run.agents // -(-run.agents // PER_PROCESS))
        self._lines: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for turn, first in enumerate(range(0, run.agents, self._share)):
            ours, theirs = context.Pipe()
            where = Place(
                nodes=range(first, min(first + self._share, run.agents)),
                port=job.port,
                secret=job.directory.secret(),
                job_id="scale",
                # One address does not have enough ports for all: each process has its own address.
                source=f"127.0.0.{2 + turn}",
                beat_s=run.beat_s,
            )
            process = context.Process(target=simulate, args=(where, theirs), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            began = time.monotonic()
            self._job.stop()
            print(f"  stopped after {time.monotonic() - began:.1f} s", flush=True)
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all agents so far."""
        return sum(_cpu_s(psutil.Process(process.pid)) for process in self._processes)

    def tell(self, order: str, node: int) -> None:
        """Send an order to the process of one agent."""
        self._lines[node // self._share].send((order, node))

    def tell_all(self, order: str) -> None:
        """Send an order to every process."""
        for line in self._lines:
            line.send((order, 0))

    def step(self) -> None:
        """Let all ranks finish the first step of their generation."""
        self.tell_all("step")
        self._hear("stepped")

    def regrouped(self) -> list[Tally]:
        """Wait until every agent has its Form; return the times that the processes saw."""
        return self._hear("ready")

    def _hear(self, what: str) -> list[Any]:
        """Wait until every process has sent this message; return the values."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(found) < len(self._lines):
            ready = wait(self._lines, timeout=deadline - time.monotonic())
            if not ready:
                raise SystemExit(f"{len(found)} of {len(self._lines)} processes are {what}")
            for line in ready:
                assert isinstance(line, Connection)
                try:
                    said, value = line.recv()
                except EOFError:
                    raise SystemExit("a process of simulated agents has died") from None
                if said == "trouble":
                    raise SystemExit(value)
                if said == what:
                    found[self._lines.index(line)] = value
        return list(found.values())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 1)


# ---- results


def _show(result: dict[str, Any]) -> None:
    table(
        (
            "agents", "told, ms", "at most", "regroup, ms", "CPU while training, %",
            "memory, MB", "peak", "agents' CPU, %", "all train after, s",
        ),
        [
            (
                agents, number(row["told_ms"]), number(row["told_max_ms"]),
                number(row["regroup_ms"]), number(row["heartbeat_cpu_percent"]),
                number(row["memory_mb"]), number(row["memory_peak_mb"]),
                number(row["agents_cpu_percent"]), row["started_s"],
            )
            for agents, row in result.items()
        ],
    )  # fmt: skip
    for agents, row in result.items():
        table(
            (
                f"{agents} agents, ms",
                "first told",
                "told",
                "arrived",
                "decided",
                "regroup",
                "CPU of all",
            ),
            [
                (kind, *(number(seen[f"{key}_ms"]) for key in _PARTS))
                for kind, seen in row["faults"].items()
            ],
        )
        stages = row["machine_ms"]
        slowest = sorted(stages, key=stages.__getitem__)[-3:]
        told = ", ".join(f"{name} {number(stages[name])} ms" for name in reversed(slowest))
        print(f"the machine alone: {number(sum(stages.values()))} ms of CPU; most: {told}")
    row = result.get(str(TARGET_AGENTS))
    said = "not measured"
    if row is not None:
        met = row["told_max_ms"] < TARGET_TOLD_MS and row["heartbeat_cpu_percent"] < 100
        said = "met" if met else "missed"
    print(
        f"\ntarget, {TARGET_AGENTS:,} agents on one core and all told within "
        f"{TARGET_TOLD_MS:,.0f} ms: {said}"
    )


_PARTS = ("first_told", "told", "arrived", "decided", "regroup", "cpu")

if __name__ == "__main__":
    main()
