"""Live ranks without progress: agents detect them by their activity, name and replace them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from training_jobs import LONG, RANKS
from training_jobs.baselines import Baselines
from training_jobs.checks import steps_lost
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.processes import marked_processes
from training_jobs.rows import fails, fails_with, paused
from waiting import bound_s

from rekindle import names
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

SOON = Policy(max_restarts=0, hang_timeout_s=bound_s(2.0), idle_timeout_s=bound_s(3.0))
HANGS = ("hang", "hang-collective", "hang-data", "stop", "livelock")
_DUMP = "Current thread"  # starts one thread's stack in each answer of a rank


def hold(step: int) -> Fault:
    """Return a pause that holds the job in a step during an injection."""
    return Fault(0, "forward", step, do="pause", life=0)


def hangs(kind: str, rank: int, step: int) -> Row:
    """Return the row: a rank that hangs is named and replaced."""

    def inject(job: Job, number: int) -> None:
        job.inject_held(number, kind, rank=rank, step=step + 3)

    def is_named(ended: Ended, incident: journal.Incident) -> None:
        other = (rank + 1) % RANKS
        assert f"rank {other}: in a step" in incident.cause.traceback
        if kind != "stop":  # a stopped process does not answer
            assert "faults/repairs.py" in incident.cause.traceback

    cause = FaultKind.HANG, rank
    return Row(kind, step, (hold(step),), inject, replaced={rank}, cause=cause, check=is_named)


def looks(job: Job, rank: int) -> int:
    """Return the number of stack reports of a rank to its agent."""
    logs = Path(job.spec.log_directory).glob(f"attempt_*/{rank}/{names.STACK_FILE}")
    return sum(log.read_text().count(_DUMP) for log in logs)


def wait_looks(job: Job, before: list[int]) -> None:
    """Wait until each rank has reported its stacks twice more."""

    def twice() -> bool:
        return all(looks(job, rank) >= before[rank] + 2 for rank in range(RANKS))

    job.wait(twice, "two looks at all ranks")


def takes_long(name: str, place: str, do: str, step: int) -> Row:
    """Return the row: all ranks wait for one; agents read the stacks twice and end no rank."""

    def release(job: Job, number: int) -> None:
        before = [looks(job, rank) for rank in range(RANKS)]
        job.wait_fault(number)
        wait_looks(job, before)
        job.release(number)

    fault = Fault(0, place, step, do=do, life=0)
    return Row(name, step, (fault,), release, strategies=())


def compiles(step: int) -> Row:
    """Return the row: a replacement computes for long in its first step; all others wait."""

    def release(job: Job, number: int) -> None:
        job.wait_fault(number)
        # Agents must see a step to measure its usual time.
        job.wait(lambda: job.status().finished == step, "a look at the step")
        before = [looks(job, rank) for rank in range(RANKS)]
        job.release(number)
        job.wait_fault(number + 2)
        wait_looks(job, before)
        job.release(number + 2)

    killed = Fault(1, "forward", step + 3, life=0)
    computes = Fault(1, "forward", do="compute", life=0, after=1)
    faults = hold(step), killed, computes
    cause = FaultKind.PROCESS, 1
    return Row("a long compilation", step, faults, release, replaced={1}, cause=cause)


def night(step: int) -> Row:
    """Return the row: all processes are suspended longer than any limit, and continue."""

    def sleep(job: Job) -> None:
        lines = marked_processes(job.mark)
        processes = [psutil.Process(int(line.split(":")[0])) for line in lines]
        for process in processes:
            process.suspend()
        morning = time.monotonic() + 1.5 * job.spec.policy.hang_timeout_s
        job.wait(lambda: time.monotonic() > morning, "the end of the night")
        for process in processes:
            process.resume()

    return paused("a suspended machine", step, sleep, strategies=())


DDP = Plan(
    "ddp",
    (
        fails(
            hangs("hang-collective", 2, 4),
            hangs("stop", 1, 10),
            hangs("hang", 3, 16),
            takes_long("a rank that evaluates on its own", "between", "compute", 22),
            fails_with([1], "forward", 25),
            policy=SOON,
        ),
        fails(
            hangs("hang-data", 0, 32),
            takes_long("a rank that announces an evaluation", "evaluate", "pause", 38),
            fails_with([3], "update", 41),
        ),
        fails(
            hangs("livelock", 2, 48),
            takes_long("a rank that keeps its state", "keep state", "pause", 54),
            fails_with([0], "backward", 57),
        ),
        fails(
            compiles(64),
            takes_long("a rank that rests between two steps", "between", "pause", 70),
            fails_with([1], "between", 74),
        ),
        Attempt(
            (night(80),),
            {"policy": Policy(hang_timeout_s=bound_s(4.0), max_restarts=0)},
        ),
    ),
    steps=LONG,
    settings={"nodes": 2},
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "row"), each_row(DDP))
def test_rank_without_progress(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """A rank that hangs is named and only that rank is replaced; a slow rank is not replaced."""
    ended_of(plan).check(row)


def test_end(ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all faults equals that of an undisturbed job."""
    ended_of(DDP).check_end(baseline_of("ddp", RANKS, LONG))


UNTOUCHED = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
value = torch.ones(1)
for step in range(200):
    if step == 100 and not again and dist.get_rank() == 1:
        time.sleep(10_000)
    dist.all_reduce(value)
    value /= 2
dist.destroy_process_group()
print("well done", flush=True)
"""


def test_a_script_without_a_session(job: Callable[..., Job], tmp_path: Path) -> None:
    """If no process of a script without a Session makes progress, all its ranks restart."""
    script = tmp_path / "untouched.py"
    script.write_text(UNTOUCHED)
    run = job(nodes=2, processes=RANKS, policy=SOON, script=script)
    assert run.end().outcome == "succeeded", run.story()
    (incident,) = run.incidents()
    assert incident.strategy is Strategy.HANG_RESTART
    assert (incident.cause.kind, incident.cause.rank) == (FaultKind.HANG, 1), incident.cause
    assert "untouched.py" in incident.cause.traceback


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", HANGS)
def test_twenty_hangs_of_each_kind(kind: str, job: Callable[..., Job]) -> None:
    """With default limits each hang is detected within 15 s, at least 19 of 20 in the right rank.

    The time starts at the last record of a rank before its hang.
    """
    run = job(nodes=2, steps=100_000, policy=Policy(max_recoveries=1000))
    right, seconds = 0, []
    for turn in range(20):
        run.wait_event(journal.FirstStep, count=turn + 1)
        rank = turn % 4
        run.inject(kind, rank=rank)
        event = run.wait_event(journal.FaultSeen, count=turn + 1)
        right += (event.fault.kind, event.fault.rank) == (FaultKind.HANG, rank)
        records = [line["at"] for line in run.record.lines(rank)]
        seconds.append(event.at - max(at for at in records if at < event.at))
    print(f"{kind}: {right} of 20 named, decided after {min(seconds):.1f} to {max(seconds):.1f} s")
    run.wait_event(journal.FirstStep, count=21)
    assert right >= 19
    assert max(seconds) <= 15.0
    assert sum(steps_lost(run)) == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_steps_of_varying_length(job: Callable[..., Job]) -> None:
    """A step that takes ten times as long as another is not a hang."""
    run = job(steps=10_000, policy=Policy(), misfit={"SHORTEST_STEP_S": "0.002"})
    assert run.end(3000).outcome == "succeeded", run.story()
    assert not run.incidents()
