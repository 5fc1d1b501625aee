"""Run one row of the table on a job: wait for the phase, send the signal, and check the outcome."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from waiting import wait_until

from process_faults import Outcome, Phase, Row, Victim
from process_faults.started import RANKS, SNAPSHOT_EVERY, Started, rank_process
from rekindle.checkpoints.files import locked
from rekindle.recovery.journal import journal

# What each outcome costs: new coordinators, agents that the job asked for, processes of ranks. Each
# node has one rank.
_COSTS = {
    Outcome.NOTHING: (0, 0, 0),
    Outcome.COORDINATOR: (1, 0, 0),
    Outcome.RANK: (0, 0, 1),
    Outcome.AGENT: (0, 1, 0),
    Outcome.NODE: (0, 1, 1),
    Outcome.RESTART: (0, 0, RANKS),
    Outcome.REPLACED: (0, 1, RANKS),
    Outcome.AGENTS: (1, RANKS, 0),
    Outcome.NODES: (1, RANKS, RANKS),
    Outcome.ADOPTED: (0, 0, 0),
}
# Steps since a snapshot.
_MAY_LOSE = {Outcome.RESTART, Outcome.REPLACED, Outcome.NODES, Outcome.AGAIN}


class Gates:
    """The gates of the script. A closed gate holds each rank that comes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def close(self, *names: str) -> None:
        """Close gates."""
        for name in names:
            (self._folder / f"closed-{name}").touch()

    def open(self, name: str) -> None:
        """Let all ranks pass."""
        (self._folder / f"closed-{name}").unlink(missing_ok=True)

    def reached(self, name: str, ranks: Sequence[int] = range(RANKS)) -> bool:
        """Return whether these ranks wait at the gate."""
        return all((self._folder / f"at-{name}-{rank}").exists() for rank in ranks)


def closed_at_first(phase: Phase) -> list[str]:
    """Return the gates that are closed when the job begins. `late` keeps the job in its steps."""
    first = {Phase.START: "start", Phase.CHECKPOINT: "start", Phase.END: "end"}.get(phase)
    return [gate for gate in (first, None if phase is Phase.END else "late") if gate]


@contextlib.contextmanager
def held(row: Row, job: Started, gates: Gates) -> Iterator[None]:
    """Wait for the phase. The job continues from there when the block ends."""
    handle = job.handle
    match row.phase:
        case Phase.LAUNCH:
            job.begun(row.victim)
            yield
        case Phase.START | Phase.END:
            gate = row.phase.value
            handle.wait_until(lambda: gates.reached(gate), f"all ranks at the gate {gate}")
            yield
            gates.open(gate)
        case Phase.TRAINING:
            handle.wait_event(journal.FirstStep)
            yield
        case Phase.RECOVERY:
            handle.wait_event(journal.FirstStep)
            gates.close("start")
            rank_process(job.folder, 1).kill()
            handle.wait_until(lambda: gates.reached("start", [1]), "the new process of rank 1")
            yield
            gates.open("start")
        case Phase.CHECKPOINT:
            handle.wait_until(lambda: gates.reached("start"), "all ranks at their start")
            store = Path(handle.directory.spec().checkpoint_store)
            store.mkdir(parents=True, exist_ok=True)
            with locked(store):
                gates.open("start")
                handle.wait_until(lambda: _waits_for_lock(store), "a writer of a checkpoint")
                yield


def _waits_for_lock(store: Path) -> bool:
    """Return whether a process waits for the lock of the store."""
    inode = (store / ".lock").stat().st_ino
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and line.split()[-3].endswith(f":{inode}") for line in lines)


def strike(row: Row, job: Started) -> list[psutil.Process]:
    """Send the signal of the row. Return the processes that got it."""
    if row.victim is Victim.RANK:
        victims = [rank_process(job.folder, int(row.phase is Phase.RECOVERY))]
    else:
        victims = job.processes(row.victim)
    assert victims, f"no process of {row.victim.value}{job.story()}"
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend() if row.seconds else process.kill()
    return victims


def resume_after(victims: list[psutil.Process], seconds: float) -> None:
    """Let stopped processes continue after this time, if nothing has ended them."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, "the end of the suspension", 2 * seconds)
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def play(row: Row, job: Started, gates: Gates) -> None:
    """Send the signal in the phase; wait for the end of the job; check what it cost."""
    with held(row, job, gates):
        victims = strike(row, job)
    if row.seconds:
        resume_after(victims, row.seconds)
    gates.open("late")
    again = Outcome.AGAIN in row.outcomes
    if again:
        job.launch_again()
    job.end()
    assert job.launches == 1 + again
    check_costs(row, job)


def check_costs(row: Row, job: Started) -> None:
    """Check that an allowed outcome explains all new processes and all lost steps."""
    handle = job.handle
    own_fault = int(row.phase is Phase.RECOVERY)  # the rank that the test killed first
    started = sum(len(event.ranks) for event in handle.events_of(journal.RanksStarted))
    nodes = len({event.node for event in handle.events_of(journal.NodeWanted)})
    found = (job.new_coordinators(), nodes, started - RANKS - own_fault)
    allowed = [outcome for outcome in row.outcomes if _COSTS.get(outcome, found) == found]
    assert allowed, f"{row}: {found} is none of {row.outcomes}{job.story()}"
    lost = sum(incident.steps_lost or 0 for incident in handle.incidents())
    most = 2 * SNAPSHOT_EVERY if _MAY_LOSE & row.outcomes else 0
    # The agent of node 0 has the only state while rank 1 restarts.
    if row.victim is Victim.AGENT and row.phase is Phase.RECOVERY:
        most = 2 * SNAPSHOT_EVERY
    assert lost <= most, f"{row}: {lost} steps lost{job.story()}"
