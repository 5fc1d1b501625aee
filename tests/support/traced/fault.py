"""Trace one SIGKILL of a rank in all processes of the job, and list the files of the recovery.

`python -m traced.fault` (with tests/support on PYTHONPATH) prints the files and their numbers. The
processes call some functions at a fixed interval (heartbeats, the memory watch), so the numbers
differ slightly between runs. The command prints the median of `RUNS`.
"""

from __future__ import annotations

import ast
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jobs import Place
from jobs.scripts import TRAINS
from repository import ROOT

from rekindle.recovery.journal import journal

PACKAGE = ROOT / "rekindle"
RUNS = 5
KILLED = 1  # the killed rank
HOOK = Path(__file__).with_name("hook")
# A call of a method with one of these names sends or writes something.
EMITS = {"send", "sendall", "write", "kill", "do", "record", "tell", "say"}
# A method with one of these names changes its object. It counts if the object belongs to `self`.
CHANGES = {
    *("append", "appendleft", "put", "put_nowait", "add", "discard", "pop", "popleft", "clear"),
    *("update", "remove", "extend", "insert", "setdefault", "set", "close"),
}


@dataclass(frozen=True)
class Call:
    """A call of a function. `file`: the path below the package. `line`: the line of its `def`."""

    at: float
    pid: int
    file: str
    line: int


@dataclass(frozen=True)
class Trace:
    """The calls between the SIGKILL and the first step of the next generation.

    `processes`: the process ids by role in the recovery. "peers" are all ranks except the killed
    one. "every rank" are the peers and the new rank.
    `events`: the events of the journal in the same time.
    """

    calls: tuple[Call, ...]
    processes: Mapping[str, tuple[int, ...]]
    events: tuple[journal.AnyEvent, ...]

    @cached_property
    def files(self) -> frozenset[str]:
        """The files with a function that was called."""
        return frozenset(call.file for call in self.calls)

    @cached_property
    def acting(self) -> frozenset[str]:
        """The files with a called function that changes state, sends or writes something."""
        return frozenset(
            call.file for call in set(self.calls) if call.line in _acting_lines(call.file)
        )

    @property
    def of_machine(self) -> frozenset[str]:
        """The files of the coordinator's state machine."""
        return frozenset(file for file in self.files if file.startswith("coordinator/machine/"))


def trace_sigkill(place: Place) -> Trace:
    """Run four ranks, kill one, and return the calls until the next generation's first step."""
    out = place.folder / "calls"
    paths = f"{HOOK}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    traced = {"PYTHONPATH": paths, "TRACED_PACKAGE": str(PACKAGE), "TRACED_OUT": str(out)}
    run = place.start("--nproc-per-node", "4", place.script(TRAINS), env=place.environment(traced))
    for rank in range(4):
        run.wait_for_output(rank, "step 2")
    before = run.client().status()
    begin = time.time()
    os.kill(before.ranks[KILLED].pid, signal.SIGKILL)
    (place.folder / "go").touch()
    first = run.wait_event(journal.FirstStep, generation=2)
    run.end(0)
    history = run.events()
    started = [event for event in history if isinstance(event, journal.JobStarted)]
    calls = tuple(call for call in _read(out) if begin <= call.at <= first.at)
    peers = tuple(rank.pid for rank in before.ranks if rank.rank != KILLED)
    new = _newest_rank(calls, known=peers)
    processes = {
        "coordinator": (started[0].pid,),
        "agent": tuple(node.pid for node in before.nodes),
        "peers": peers,
        "new rank": (new,),
        "every rank": (*peers, new),
    }
    events = tuple(event for event in history if begin <= event.at <= first.at)
    return Trace(calls, processes, events)


def _newest_rank(calls: Iterable[Call], known: Iterable[int]) -> int:
    """Return the process id of the rank that replaces the killed rank.

    Only a rank runs a script. A host of a store calls other functions of the same file.
    """
    file = "rank/program.py"
    lines = lines_of(file, "run")
    (new,) = {call.pid for call in calls if call.file == file and call.line in lines} - set(known)
    return new


def lines_of(file: str, name: str) -> frozenset[int]:
    """Return the lines of a function in a trace: its own and those of its decorators.

    `name`: the name with its class, as in `Member.join`.

    Raises KeyError: the file has no such function.
    """
    found: list[ast.AST] = [ast.parse((PACKAGE / file).read_text())]
    for part in name.split("."):
        found = [
            child
            for node in found
            for child in ast.iter_child_nodes(node)
            if getattr(child, "name", None) == part
        ]
    lines = frozenset(
        each.lineno
        for node in found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in (node, *node.decorator_list)
    )
    if not lines:
        raise KeyError(f"rekindle/{file} has no function {name}")
    return lines


def _read(path: Path) -> list[Call]:
    if not path.exists():
        raise RuntimeError(
            f"the processes run another copy of the package: put {ROOT} on PYTHONPATH"
        )
    calls = []
    for text in path.read_text().splitlines():
        at, pid, where = text.split(" ")
        file, line = where.rsplit(":", 1)
        calls.append(Call(float(at), int(pid), file, int(line)))
    return calls


def _acting_lines(file: str) -> set[int]:
    """Return the first lines of a file's functions that change state, send or write something."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _acts(node):
            found |= {node.lineno, *(each.lineno for each in node.decorator_list)}
    return found


def _acts(function: ast.AST) -> bool:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) if name.strip("_") in EMITS:
                return True
            case ast.Call(func=ast.Attribute(attr=name, value=owner)):
                if name in CHANGES and _is_of_self(owner):
                    return True
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                return True
            case ast.Subscript(ctx=ast.Store() | ast.Del(), value=owner) if _is_of_self(owner):
                return True
    return False


def _is_of_self(value: ast.expr) -> bool:
    """Return whether an expression starts at an attribute of `self`."""
    return any(isinstance(each, ast.Name) and each.id == "self" for each in ast.walk(value))


def main() -> None:
    traces = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder, Place(Path(folder, "place")) as place:
            traces.append(trace_sigkill(place))
    for file in sorted(frozenset().union(*(trace.files for trace in traces))):
        called = sum(file in trace.files for trace in traces)
        acts = "acts" if any(file in trace.acting for trace in traces) else ""
        sys.stdout.write(f"{file:50}{called:2} of {RUNS}  {acts}\n")
    files = statistics.median(len(trace.files) for trace in traces)
    acting = statistics.median(len(trace.acting) for trace in traces)
    machine = statistics.median(len(trace.of_machine) for trace in traces)
    sys.stdout.write(f"{files} files, of which {acting} change state or emit something\n")
    sys.stdout.write(f"{machine} files in coordinator/machine/\n")


if __name__ == "__main__":
    main()
