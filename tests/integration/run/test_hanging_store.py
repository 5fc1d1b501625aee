"""The file system of the checkpoints hangs: training continues, and the job can be stopped."""

from __future__ import annotations

import signal
from pathlib import Path

from jobs import Place
from process_faults.playing import Gates
from process_faults.started import CommandJob

from rekindle.checkpoints.files import locked
from rekindle.recovery.journal import journal

LIMIT_S = 2  # for the final checkpoint
WAITS = f"the end of the job waits for the checkpoint store, for {LIMIT_S} s at most"


def test_a_job_that_stops_while_its_store_hangs(place: Place) -> None:
    """Ranks train on beside a write that hangs. After SIGTERM all processes end in spite of it.

    Each node gets its time for the final checkpoint, and the agent that still writes says so.
    """
    gates = Gates(place.folder)
    gates.close("start", "late")
    place.script(f"dump_timeout_s: {LIMIT_S}\nmax_restarts: 0\n", "policy.yaml")
    run = CommandJob(place, "--policy", "policy.yaml").start().run
    run.wait_until(lambda: gates.reached("start"), "all ranks at their start")
    store = Path(run.directory.spec().checkpoint_store)
    store.mkdir()
    with locked(store):
        gates.open("start")
        run.wait_until(lambda: gates.reached("late"), "the last steps")
        run.signal(signal.SIGTERM)
        run.end(128 + signal.SIGTERM)
    late = f"it did not write its shards within {LIMIT_S} s"
    reports = run.events_of(journal.FinalCheckpoint, error=late)
    assert [report.node for report in reports] == [0, 1]
    ends = f"the agent ends, although the checkpoint store has not answered for {LIMIT_S} s"
    assert run.stderr.count(ends) == 2
    (left_out,) = run.events_of(journal.CheckpointLeftOut)
    assert left_out.reason == "the store was busy with the checkpoint of step 10"
    assert run.events_of(journal.Ended)[-1].finished == 38


def test_a_job_that_ends_while_its_store_hangs(place: Place) -> None:
    """The job succeeds without the checkpoints that its store does not take in time.

    A line says what the end waits for, and an incident names the checkpoint.
    """
    gates = Gates(place.folder)
    gates.close("start")
    place.script(f"dump_timeout_s: {LIMIT_S}\nmax_restarts: 0\n", "policy.yaml")
    run = CommandJob(place, "--policy", "policy.yaml").start().run
    run.wait_until(lambda: gates.reached("start"), "all ranks at their start")
    store = Path(run.directory.spec().checkpoint_store)
    store.mkdir()
    with locked(store):
        gates.open("start")
        run.end(0)
    assert WAITS in run.stderr
    (incident,) = run.incidents()
    failed = f"writing the checkpoint of step 10 failed: the store has not answered for {LIMIT_S} s"
    assert incident.cause.message == failed
    assert run.events_of(journal.Ended)[-1].outcome == "succeeded"
