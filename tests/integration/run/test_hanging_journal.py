"""The file system of the journal hangs: training continues, and no node is lost."""

from __future__ import annotations

import os
from pathlib import Path

import hanging
from hanging import LONG_S
from jobs import Place
from jobs.scripts import TRAINS

from rekindle.coordinator.event_log import HANGS_S
from rekindle.recovery.journal import journal

HOOK = Path(hanging.__file__).with_name("journal")
KEEPS_EVENTS = "the coordinator keeps events in memory until it can write again"


def environment(place: Place, cause: Path) -> dict[str, str]:
    """Return the environment of a job whose journal hangs while `cause` exists."""
    paths = f"{HOOK}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return place.environment({"PYTHONPATH": paths, "HANGING_JOURNAL": str(cause)})


def test_recovery_while_the_journal_hangs(place: Place) -> None:
    """A rank dies while the journal hangs. The job recovers, and the journal gets all events.

    The orders wait for their events at most HANGS_S. The agents stay connected for the complete
    time, which is longer than a lost agent is silent.
    """
    assert HANGS_S > LONG_S
    cause = place.folder / "hang"
    run = place.start("--nproc-per-node", "2", place.script(TRAINS), env=environment(place, cause))
    run.wait_event(journal.FirstStep)
    cause.touch()
    known = len(run.events())
    killed = run.pid(1)
    run.kill(1)
    run.wait_until(lambda: KEEPS_EVENTS in run.stderr, "the limit of the coordinator")
    run.wait_until(lambda: run.status().ranks[1].pid not in (0, killed), "the next process")
    assert len(run.events()) == known
    cause.unlink()
    (place.folder / "go").touch()
    run.end(0)
    numbers = [event.seq for event in run.events()]
    assert numbers == [*range(1, len(numbers) + 1)]
    (incident,) = run.incidents()
    assert incident.closed
    assert "lost its connection" not in run.stderr
