"""Light profiling of a running job: its ranks write records in the specified format."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training_jobs import RANKS
from training_jobs.baselines import Baselines
from training_jobs.checks import assert_recovered
from training_jobs.injection import Fault
from training_jobs.job import STEPS, Job, pause_all

from rekindle.errors import JobError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

HELD = 3  # the step in which the switch is set
TWO = 2  # ranks, in tests for which two are enough


def held(job: Callable[..., Job], *faults: Any, ranks: int = TWO, **settings: object) -> Job:
    """Start a job whose ranks wait in a step."""
    run = job(*pause_all(HELD, ranks), *faults, processes=ranks, **settings)
    run.wait_pause(HELD)
    return run


def task_of(run: Job) -> Path:
    """Return the only task folder."""
    (task,) = (run.directory.path / "profiling").iterdir()
    return task


def records(run: Job, rank: int) -> Iterator[dict[str, Any]]:
    """Return all records of a rank, read only by the format's specification."""
    files = [path for path in (task_of(run) / str(rank)).iterdir() if path.name.isdigit()]
    for path in sorted(files, key=lambda path: int(path.name)):
        yield from map(json.loads, path.read_text().splitlines())


def spans(run: Job, rank: int) -> list[tuple[str, int, int]]:
    """Return name, start and end of all spans of a rank."""
    open_: dict[int, dict[str, Any]] = {}
    found = []
    for record in records(run, rank):
        begun = open_.pop(record["Id"], None)
        if begun is None:
            open_[record["Id"]] = record
        else:
            assert (begun["Name"], begun["Flag"], record["Flag"]) == (record["Name"], 2, 4)
            found.append((record["Name"], begun["Timestamp"], record["Timestamp"]))
    assert not open_
    return found


def steps(run: Job, rank: int) -> list[int]:
    words = (name.split() for name, _, _ in spans(run, rank))
    return [int(each[1]) for each in words if each[0] == "step"]


def recorded(run: Job, rank: int) -> range:
    """Return the steps that a rank has recorded: all from the first to the last one."""
    found = steps(run, rank)
    assert found == list(range(found[0], found[-1] + 1))
    return range(found[0], found[-1] + 1)


def test_five_kinds_are_written(job: Callable[..., Job]) -> None:
    """After the switch a rank writes five kinds of records, starting with the next step."""
    run = held(job, variant="map-0")
    run.profile("communication")
    run.wait_event(journal.Profiled)
    run.release_all()
    assert run.end().outcome == "succeeded", run.story()
    assert task_of(run).name.startswith("default_task_id_")
    for rank in range(TWO):
        own = recorded(run, rank)
        assert (own.start > HELD, own.stop) == (True, STEPS)
        kinds = Counter(name.split()[0] for name, _, _ in spans(run, rank))
        count = len(own)
        assert (kinds["forward"], kinds["dataloader"]) == (count, count)
        assert kinds["save_checkpoint"] >= (rank == 0)
        operations = [json.loads(name) for name, _, _ in spans(run, rank) if name[0] == "{"]
        assert {each["opName"] for each in operations} == {"all_reduce", "broadcast"}
        assert {each["groupName"] for each in operations} == {"default_group"}
        assert all(int(each["count"]) > 0 for each in operations)
        assert len(operations) >= count


def test_whoever_takes_the_place_of_a_rank_goes_on(
    job: Callable[..., Job], baseline_of: Baselines
) -> None:
    """A replacement writes records into the same folder, even after a change of the coordinator."""
    run = held(job)
    run.profile()
    run.kill_coordinator()
    run.revive_coordinator()
    run.inject("kill", rank=1, step=9)
    run.release_all()
    assert_recovered(run, baseline_of("ddp", TWO), replaced={1})
    for rank in range(TWO):
        assert set(steps(run, rank)) >= set(range(10, STEPS))
        assert not any(name[0] == "{" for name, _, _ in spans(run, rank))
    assert not run.events_of(journal.Profiled)[1:]


def test_off_again(job: Callable[..., Job], baseline_of: Baselines) -> None:
    """The four other kinds cannot be switched off without communication; communication can."""
    run = held(job, *pause_all(12, TWO))
    run.profile("communication")
    run.release_all()
    run.wait_pause(12, first=TWO)
    with pytest.raises(JobError, match="off only together with communication"):
        run.profile("step", on=False)
    with pytest.raises(JobError, match="stop is not a kind of record"):
        run.profile("stop")
    run.profile("communication", on=False)
    assert run.wait_event(journal.Profiled, count=2).switch.words[0] == "step"
    run.profile(on=False)
    run.release_all(first=TWO)
    assert_recovered(run, baseline_of("ddp", TWO), replaced=())
    for rank in range(TWO):
        own = recorded(run, rank)
        assert HELD < own.start < 12
        assert 12 < own.stop < STEPS


def test_a_folder_that_cannot_be_written_costs_nothing(
    job: Callable[..., Job], baseline_of: Baselines
) -> None:
    """If the folder cannot be written, a message reports that and training continues."""
    run = held(job)
    (run.directory.path / "profiling").write_text("in the way")
    run.profile()
    run.release_all()
    assert_recovered(run, baseline_of("ddp", TWO), replaced=())
    assert "the rank no longer writes profiling records" in run.stderr(0)


def test_a_rank_that_did_not_join_a_collective_is_named(job: Callable[..., Job]) -> None:
    """The incident names the collective, its step, and the rank that did not join.

    It also has the ranks that wait.
    """
    run = held(job, Fault(2, "backward", 9, do="hang"), ranks=RANKS, policy=Policy())
    run.profile("communication")
    run.release_all()
    fault = run.wait_event(journal.FaultSeen).fault
    assert (fault.kind, fault.rank) == (FaultKind.HANG, 2)
    which = r"all_reduce no\. \d of default_group in step 9"
    assert re.search(rf"ranks 0, 1, 3 in {which}, which rank 2 did not join", fault.traceback)
    assert run.end().outcome == "succeeded", run.story()
