"""Faults injected into a running job have the results of real faults; stuck ranks are replaced."""

from __future__ import annotations

import pytest
from training_jobs import LONG, RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.job import Job
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import patient
from waiting import bound_s

from rekindle.errors import JobError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

AFTER = 3  # steps between the step that holds the job and the target of the injection


def hold(step: int) -> Fault:
    """Return a pause that holds the job in a step during an injection."""
    return Fault(0, "forward", step, do="pause", life=0)


def injected(kind: str, rank: int, step: int, *, named: bool = True, **row: object) -> Row:
    """Return the row of a fault that occurs in its target step, or in the next step."""
    target = step + AFTER if named else None

    def inject(job: Job, number: int) -> None:
        job.inject_held(number, kind, rank=rank, step=target)

    def is_written(ended: Ended, incident: journal.Incident) -> None:
        text = f"{kind} injected into step {'' if target is None else target}"
        # the output of a rank is lost with its agent
        assert text in ended.job.stderr(rank) or kind == "node-lost"

    return Row(kind, step, (hold(step),), inject, check=is_written, **row)


def slow(step: int) -> Row:
    """Return the row: a slow step causes no incident, because the other ranks wait."""

    def inject(job: Job, number: int) -> None:
        job.inject_held(number, "slow", rank=1, step=step + AFTER)

    return Row("slow", step, (hold(step),), inject, strategies=())


def hang_while_others_leave(step: int) -> Row:
    """Return the row: a rank that hangs does not leave for a new generation, and is replaced."""

    def inject(job: Job, number: int) -> None:
        job.inject_held(number, "hang", rank=1, step=step + AFTER)
        job.wait(lambda: f"hang injected into step {step + AFTER}" in job.stderr(1), "the hang")
        job.kill(2)

    return Row("hang", step, (hold(step),), inject, strategies=None, replaced={1, 2})


def stuck(how: str, step: int) -> Row:
    """Return the row: a rank that cannot leave a broken step in time is replaced as well."""

    def kill(job: Job, number: int) -> None:
        job.wait_fault(number)
        job.kill(1)

    def both(ended: Ended, incident: journal.Incident) -> None:
        assert {fault.kind for fault in incident.faults} >= {FaultKind.PROCESS, FaultKind.STUCK}

    fault = Fault(2, "forward", step, do=how, life=0)
    name = f"{how} of a rank that cannot leave its step"
    return Row(name, step, (fault,), kill, strategies=None, replaced={1, 2}, check=both)


def refused(job: Job, rank: int, **more: object) -> str:
    """Return the reason of a refused injection, or an empty string."""
    try:
        job.inject("kill", rank=rank, **more)
    except JobError as error:
        return str(error)
    return ""


def refusals(step: int) -> Row:
    """Return the row: injections for a missing rank and for a past step are refused."""

    def inject(job: Job, number: int) -> None:
        job.wait_fault(number)
        job.wait(lambda: job.status().finished == step, "the steps before")
        (job.folder / "no rank").write_text(refused(job, 4))
        (job.folder / "past").write_text(refused(job, 1, step=1))
        job.release(number)

    def are_refused(ended: Ended, incident: journal.Incident) -> None:
        assert (
            "a world of 4 ranks does not have a rank 4"
            in (ended.job.folder / "no rank").read_text()
        )
        assert "step 1 is over" in (ended.job.folder / "past").read_text()

    return Row("refusals", step, (hold(step),), inject, strategies=(), check=are_refused)


def not_allowed(step: int) -> Row:
    """Return the row: a job without `--allow-injection` refuses each injection."""

    def inject(job: Job, number: int) -> None:
        job.wait_fault(number)
        (job.folder / "not allowed").write_text(refused(job, 1))
        job.release(number)

    def is_refused(ended: Ended, incident: journal.Incident) -> None:
        assert "--allow-injection" in (ended.job.folder / "not allowed").read_text()

    return Row("not allowed", step, (hold(step),), inject, strategies=(), check=is_refused)


def replaced_twice(ended: Ended, incident: journal.Incident) -> None:
    """Check that a replacement that hangs before it reaches its Session is replaced again."""
    begin, end = ended.window(next(row for row in ended.rows if row.check is replaced_twice))
    births = ended.job.record.births(1)
    assert len([at for at in births if begin <= at < end]) == 2


PLAN = Plan(
    "two nodes",
    (
        Attempt(
            (
                refusals(4),
                slow(8),
                injected("kill", 2, 14, replaced={2}, cause=(FaultKind.PROCESS, 2)),
                injected("oom", 2, 20, named=False, replaced={2}, cause=(FaultKind.DEVICE_OOM, 2)),
                injected(
                    "uce", 2, 26, strategies=(Strategy.RETRY,), cause=(FaultKind.DEVICE_MEMORY, 2)
                ),
                injected(
                    "torn-update",
                    2,
                    32,
                    named=False,
                    strategies=(Strategy.RETRY,),
                    cause=(FaultKind.DEVICE_MEMORY, 2),
                ),
                hang_while_others_leave(38),
                stuck("stop", 44),
                stuck("hang", 50),
                injected(
                    "node-lost",
                    2,
                    56,
                    strategies=(Strategy.RECOVER,),
                    replaced={2, 3},
                    cause=(FaultKind.NODE_LOST, -1),
                ),
                injected("exception", 1, 64, strategies=(Strategy.DUMP,)),
            ),
            {"policy": patient(leave_timeout_s=bound_s(3.0))},
            outcome="failed",
            reason=f"injected into step {64 + AFTER} of rank 1",
        ),
        Attempt(
            (
                not_allowed(72),
                Row(
                    "late replacement",
                    78,
                    (
                        Fault(1, "forward", 78, life=0),
                        Fault(1, "start", life=0, do="hang", after=1),
                    ),
                    strategies=None,
                    replaced={1},
                    check=replaced_twice,
                ),
            ),
            {
                "policy": patient(join_timeout_s=bound_s(2.0)),
                "allow_injection": False,
            },
        ),
    ),
    steps=LONG,
    settings={"nodes": 2},
)


@pytest.mark.parametrize(("plan", "row"), each_row(PLAN))
def test_injected_fault(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """The fault occurs at its target, and no step is lost."""
    ended_of(plan).check(row)


def test_end(ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all faults equals that of an undisturbed job."""
    ended_of(PLAN).check_end(baseline_of("ddp", RANKS, LONG))
