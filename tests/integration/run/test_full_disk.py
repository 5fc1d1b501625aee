"""The disk of the job directory is full. Training continues, and the job succeeds.

Journal, logs, metrics and checkpoints are on a small file system of their own, so the kernel
refuses each write that needs space. The journal has space in advance, so the coordinator also gets
a limit on the size of files.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import NEEDS_MOUNTS, Disk, small_disk
from jobs import Place
from process_faults.playing import Gates
from process_faults.started import CommandJob, digests, rank_process, undisturbed_digests

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal

pytestmark = [NEEDS_MOUNTS, pytest.mark.timeout(400)]

MEGABYTES = 4  # more than a job of this test needs
FULL = "No space left on device"
KEEPS_EVENTS = "the coordinator keeps events in memory until it can write again"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Return the disk with the home of all jobs."""
    with small_disk(tmp_path / "place" / "home", MEGABYTES) as found:
        yield found


@pytest.fixture
def place(tmp_path: Path, disk: Disk) -> Iterator[Place]:
    """Return a place whose home is the disk."""
    with Place(tmp_path / "place") as found:
        yield found


class FullJob:
    """A job whose disk is full from its first step. `release` lets it end."""

    def __init__(self, place: Place, disk: Disk) -> None:
        self.gates = Gates(place.folder)
        self.gates.close("start", "late", "end")
        self.job = CommandJob(place).start()
        self.run = self.job.run
        self.until("start")
        disk.fill()

    def until(self, gate: str) -> None:
        """Wait until all ranks wait at a gate."""
        self.run.wait_until(lambda: self.gates.reached(gate), f"all ranks at the gate {gate}")

    def train(self) -> None:
        """Let the ranks train; kill rank 1 before the last steps."""
        self.gates.open("start")
        self.until("late")
        rank_process(self.job.folder, 1).kill()
        self.gates.open("late")
        self.until("end")

    def end(self) -> None:
        """Let the job end, and check what it says."""
        self.gates.open("end")
        self.job.end()
        said = self.run.stderr
        assert f"the rank loses step records: [Errno 28] {FULL}" in said
        assert f"log of [default0]: {FULL}; lines of it are lost" in said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the digests of a job without a fault."""
    return undisturbed_digests(tmp_path_factory.mktemp("undisturbed") / "place")


def test_a_disk_that_is_full_for_a_while(place: Place, disk: Disk, undisturbed: list[str]) -> None:
    """A rank dies while nothing can be written. No step is lost, and the journal has each event."""
    full = FullJob(place, disk)
    run, file = full.run, full.run.directory.journal_file
    coordinator = run.only("coordinator").pid
    before = resource.prlimit(coordinator, resource.RLIMIT_FSIZE)
    resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (file.stat().st_size, before[1]))
    full.train()
    assert KEEPS_EVENTS in run.stderr
    assert run.events_of(journal.FirstStep) == []
    resource.prlimit(coordinator, resource.RLIMIT_FSIZE, before)
    disk.free()
    full.end()
    check(full, undisturbed)


@pytest.mark.soak
def test_a_disk_that_stays_full(place: Place, disk: Disk, undisturbed: list[str]) -> None:
    """The job succeeds. Its journal has the end, in the space that it has in advance."""
    full = FullJob(place, disk)
    full.train()
    full.end()
    check(full, undisturbed)
    assert full.run.events_of(journal.Checkpointed) == []


def check(full: FullJob, undisturbed: list[str]) -> None:
    """Check that training was not disturbed, and that each failed checkpoint is an incident."""
    run = full.run
    assert digests(full.job.folder) == undisturbed
    numbers = [event.seq for event in run.events()]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert run.events_of(journal.Ended)[-1].outcome == "succeeded"
    storage = [each for each in run.incidents() if each.cause.kind is FaultKind.STORAGE]
    (process,) = [each for each in run.incidents() if each.cause.kind is not FaultKind.STORAGE]
    assert (process.closed, process.steps_lost) == (True, 0)
    assert storage
    for incident in storage:
        assert f"{FULL}; free some space, or keep fewer checkpoints" in incident.cause.message
