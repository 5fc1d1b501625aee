"""Reads the kernel's counters about a rank's process and all its descendants."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_FEW_TICKS = 2.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
STOPPED = "T"  # by a signal; a tracer stops a process in another state
_RUNS, _WAITS_FOR_DISK = "R", "D"
BUSY_SHARE = 0.05  # one core is 1.0; on an overloaded machine a loop has no larger share
MOVING_BYTES_PER_S = 16_384  # a slow upload; a process that prints ten times a second writes less
WAITS_PER_S = 5.0  # a DataLoader that waits for a batch polls once in 5 s
RESTING_SHARE = 0.01  # a thread that polls at intervals takes less


class Activity(NamedTuple):
    """The total activity of a process and its descendants so far.

    cpu_s: on all cores. io_bytes: read and written, including pipes and terminals, and so the
    rank's printed output. states: of the processes in the form of /proc, the rank's own first.

    waits: the number of voluntary context switches of their main threads.
    """

    cpu_s: float
    io_bytes: int
    states: str
    waits: int = 0

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the rank itself."""
        return self.states.startswith(STOPPED)

    def is_busy(self, before: Activity, seconds: float) -> bool:
        """Return whether they have computed since then, or wait for a disk."""
        if _WAITS_FOR_DISK in self.states or (_RUNS in self.states and _RUNS in before.states):
            return True
        return self.cpu_s - before.cpu_s >= BUSY_SHARE * seconds

    def moves(self, before: Activity, seconds: float) -> bool:
        """Return whether they have read or written more since then than a log or a progress bar."""
        return self.io_bytes - before.io_bytes >= MOVING_BYTES_PER_S * seconds

    def wakes(self, before: Activity, seconds: float) -> bool:
        """Return whether a main thread has waited often since then: for a socket, or in a poll.

        The kernel does not count the bytes of send() and recv() as read or written. Other threads
        do not count, because libraries have threads that poll without end.
        """
        return self.waits - before.waits >= WAITS_PER_S * seconds

    def waits_for_disk(self, before: Activity) -> bool:
        """Return whether a process waited for a disk then, and one does now."""
        return _WAITS_FOR_DISK in self.states and _WAITS_FOR_DISK in before.states

    def rests(self, before: Activity, seconds: float) -> bool:
        """Return whether they have done nothing since then, except what a timer does."""
        # The kernel counts ticks, so a few ticks in a short time do not measure a share.
        idle = self.cpu_s - before.cpu_s < max(RESTING_SHARE * seconds, _FEW_TICKS / _TICKS_PER_S)
        return idle and self.io_bytes == before.io_bytes


class _Process(NamedTuple):
    parent: int
    session: int
    state: str
    ticks: int


def activities(leaders: Iterable[int]) -> dict[int, Activity]:
    """Return the activity of each of these processes and their descendants, without dead ones.

    leaders: ranks; each leads its own session. Other processes of the session also count, because a
    descendant may have lost its parent. This reads every process of the machine.
    """
    processes = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (found := _process(entry)) is not None:
            processes[int(entry.name)] = found
    members: dict[int, list[int]] = {pid: [pid] for pid in leaders if pid in processes}
    of = {pid: pid for pid in members}
    for pid in sorted(processes):
        leader = _leader(pid, processes, of)
        if leader is not None and pid != leader:
            members[leader].append(pid)
    return {leader: _sum(pids, processes) for leader, pids in members.items()}


def states(pids: Iterable[int]) -> dict[int, str]:
    """Return the state of each of these processes in the form of /proc, without dead ones."""
    entries = {pid: entry for pid in pids if (entry := _PROC / str(pid)).exists()}
    found = {pid: _process(entry) for pid, entry in entries.items()}
    return {pid: process.state for pid, process in found.items() if process is not None}


def _leader(pid: int, processes: dict[int, _Process], of: dict[int, int]) -> int | None:
    """Return the leader that is an ancestor of a process or leads its session."""
    path: list[int] = []
    while pid in processes and pid not in of and pid not in path:
        path.append(pid)
        session = processes[pid].session
        pid = session if session in of else processes[pid].parent
    leader = of.get(pid)
    if leader is not None:
        of.update(dict.fromkeys(path, leader))
    return leader


def _sum(pids: list[int], processes: dict[int, _Process]) -> Activity:
    ticks = sum(processes[pid].ticks for pid in pids)
    states = "".join(processes[pid].state for pid in pids)
    return Activity(ticks / _TICKS_PER_S, sum(map(_io_bytes, pids)), states, sum(map(_waits, pids)))


def _process(entry: Path) -> _Process | None:
    """Read /proc/PID/stat (proc(5)): state, parent, session, and time including dead children."""
    try:
        # The name of a process can be any bytes.
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
    # After the name: 0 state, 1 parent, 3 session, 11-14 user and system time, own and children's.
    return _Process(int(fields[1]), int(fields[3]), fields[0], sum(map(int, fields[11:15])))


def _io_bytes(pid: int) -> int:
    """Read /proc/PID/io (proc(5)): the bytes of read() and write(), for any file."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        lines = dict(line.split(":") for line in (_PROC / str(pid) / "io").read_text().splitlines())
        return int(lines["rchar"]) + int(lines["wchar"])
    return 0


def _waits(pid: int) -> int:
    """Read /proc/PID/status (proc(5)): the voluntary context switches of the main thread."""
    with contextlib.suppress(OSError):  # it has ended
        for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0
