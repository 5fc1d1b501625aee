"""Compare the end of a trial with that of an undisturbed job, and find what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil
from jobs import Place
from training_jobs.record import Record
from training_jobs.worlds import assert_stream
from waiting import wait_until

from campaign.kinds import STEPS, Kind
from rekindle.recovery.journal import journal

_TRAINED = ("digest", "position", "rate", "updates")
_LOOK_S = 0.1
# Temporary folders that stay: torch's compiled code, and those of ranks whose agent was killed
# (docs/train/session.md, "Processes that a rank starts").
KEPT = ("torchinductor_*", "pymp-*")


class Shared(Protocol):
    """The parts that all trials of a run share."""

    def baseline(self, variant: str, ranks: int, steps: int) -> Record:
        """Return the record of an undisturbed job."""

    def server(self, name: str) -> object:
        """Return a running server: "s3" or "prefect"."""


def check_training(
    kind: Kind,
    record: Record,
    events: Sequence[journal.AnyEvent],
    shared: Shared,
) -> None:
    """Check losses, samples and final states of all ranks. Raises AssertionError."""
    worlds = {event.world_size for event in events if isinstance(event, journal.Formed)}
    if worlds != {kind.world_size}:
        _check_resized(kind, record)
        return
    baseline = shared.baseline(kind.variant, kind.world_size, STEPS)
    for rank in range(kind.world_size):
        wanted = baseline.steps(rank)
        for line in record.lines(rank):
            same = all(line["metrics"][n] == wanted[line["step"]][n] for n in ("loss", "samples"))
            assert same, f"wrong record of rank {rank}: {line}; expected {wanted[line['step']]}"
        assert sorted(record.steps(rank)) == list(range(STEPS)), f"steps of rank {rank}"
        ours, theirs = record.result(rank), baseline.result(rank)
        assert {n: ours.get(n) for n in _TRAINED} == {n: theirs[n] for n in _TRAINED}


def _check_resized(kind: Kind, record: Record) -> None:
    """Check a job whose world has shrunk: no sample is lost, and all last ranks agree."""
    assert kind.min_nodes, "the world shrank"
    assert_stream(record)
    results = [record.result(rank) for rank in range(kind.world_size)]
    last = [result for result in results if result and result["updates"] == STEPS]
    assert len({result["digest"] for result in last}) == 1, f"digests {results}"


def left_behind(place: Place, before: set[Path]) -> list[str]:
    """Return what an ended job has left; then remove it.

    `before`: the files of /dev/shm before the job. A new file counts only if no process uses it.
    """
    found = [f"left: process {text}" for text in place.left()]
    kept = {path for name in KEPT for path in place.temporary.glob(name)}
    found += [f"left: {path}" for path in {*place.temporary.iterdir()} - kept]
    new = lambda: {p for p in Path("/dev/shm").iterdir() if p not in before} - used()  # noqa: E731
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not new(), "no file in /dev/shm", pause_s=_LOOK_S)
    found += [f"left: {path}" for path in sorted(new())]
    for process in place.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return found


def used() -> set[Path]:
    """Return the files in /dev/shm that a process maps or has open."""
    found: set[Path] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            words = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
            found |= {Path(word) for word in words if word.startswith("/dev/shm/")}
            found |= {Path(file.path) for file in process.open_files()}
    return found
