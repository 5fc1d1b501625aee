"""Rows that several tables share: killed ranks, passing faults, and errors of the script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy
from training_jobs import RANKS
from training_jobs.acts import kill
from training_jobs.ended import Ended
from training_jobs.injection import Fault, held
from training_jobs.job import LIMIT_S, Job, pause_all
from training_jobs.plans import Attempt, Row

RETRY = (Strategy.RETRY,)
NODE = (Strategy.RECOVER,)
ERROR = "RuntimeError: NCCL error in table: injected into step"
EVERY = frozenset(range(RANKS))  # all ranks
PASSING = {
    "hiccup": FaultKind.TRANSIENT,
    "uce": FaultKind.DEVICE_MEMORY,
    "uce-temporary": FaultKind.DEVICE_MEMORY,
}


def patient(**limits: Any) -> Policy:
    """Return a policy with limits, in which a rank that a test pauses does not hang.

    Without another limit it allows no restart of all ranks.
    """
    return Policy(**{"hang_timeout_s": LIMIT_S, "max_restarts": 0, **limits})


def paused(
    name: str,
    step: int,
    act: Callable[[Job], Any],
    *,
    ranks: int = RANKS,
    more: Collection[Fault] = (),
    **expected: Any,
) -> Row:
    """Return a row in which all ranks pause in a step, `act` runs, and the ranks continue.

    `more`: faults after the pauses.
    """

    def meanwhile(job: Job, number: int) -> Any:
        job.wait_pause(step, number)
        result = act(job)
        job.release_all(number)
        return result

    return Row(name, step, (*pause_all(step, ranks, life=0), *more), meanwhile, **expected)


def killed(rank: int, place: str, step: int, *, after: int = 0) -> Row:
    """Return a row that kills a rank at a place of a step.

    The new process gets a live replica's state.
    """
    return Row(
        f"{place} of step {step}",
        step,
        (Fault(rank, place, step, life=0, after=after),),
        replaced={rank},
        cause=(FaultKind.PROCESS, rank),
        check=_from_a_peer,
    )


def _from_a_peer(ended: Ended, incident: journal.Incident) -> None:
    """Check that the new process got its state from a peer, and that all others kept their own."""
    assert set(incident.sources) == {"self", "peer"}
    assert incident.cause.node == incident.cause.rank // ended.job.spec.processes_per_node


def killed_while_forming(place: str) -> Row:
    """Return a row that kills a rank on its way into the first generation.

    The job replaces the rank or restarts all ranks, so its policy must allow a restart.
    """
    return Row(
        f"{place} of the first generation",
        0,
        (Fault(1, place),),
        strategies=None,
        replaced=None,
        check=_is_replaced,
    )


def _is_replaced(ended: Ended, incident: journal.Incident) -> None:
    """Check that the killed rank has a new process."""
    assert len(ended.job.record.lives(1)) > 1


def retried(how: str, rank: int, place: str, step: int, *, after: int = 0) -> Row:
    """Return a row with a fault before any rank has finished the step.

    The same processes repeat it. The fault occurs after all other ranks have passed the place, so a
    row that follows at the same place occurs in the repeated step.
    """
    pause, fault = held(Fault(rank, place, step, do=how, life=0))
    records = [dataclasses.replace(pause, rank=r, do="nothing") for r in EVERY - {rank}]
    first = [  # all of them come after the same earlier fault
        dataclasses.replace(each, after=after and after + n)
        for n, each in enumerate((*records, pause))
    ]

    def release(job: Job, number: int) -> None:
        for n in range(len(records)):
            job.wait_fault(number + n)
        job.release_abreast(number + len(records), step)

    damaged = int(how == "uce")
    return Row(
        f"{how} at {place} of step {step}",
        step,
        (*first, dataclasses.replace(fault, after=1)),
        release,
        strategies=RETRY,
        resumed=step,
        cause=(PASSING[how], rank),
        sources={"self": RANKS - damaged} | ({"peer": 1} if damaged else {}),
    )


def killed_abreast(place: str, step: int, rank: int, others: int, **expected: Any) -> Row:
    """Return a row that kills a rank at a place, once the others have finished `others` steps."""

    def release(job: Job, number: int) -> None:
        job.release_abreast(number, others)

    faults = held(Fault(rank, place, step, life=0))
    return Row(f"killed at {place}", step, faults, release, replaced={rank}, **expected)


def at_once(name: str, step: int, faults: Collection[Fault], **expected: Any) -> Row:
    """Return a row with faults of several ranks in one step, which no rank can leave before."""
    return paused(name, step, lambda job: None, more=faults, **expected)


def killed_at_once(
    name: str, step: int, ranks: Collection[int], *, of: int = RANKS, **expected: Any
) -> Row:
    """Return a row in which the test kills some ranks at the same time, all in the same step."""

    def is_one(ended: Ended, incident: journal.Incident) -> None:
        assert len(ended.incidents_of(killed)) == 1

    expected |= {"strategies": None, "replaced": ranks, "check": is_one}
    killed = paused(name, step, kill(*ranks), ranks=of, **expected)
    return killed


CORRUPT = 3  # number of wrong steps before a late report of a memory error


def reported_late(step: int, *, valid_steps: int, kept: bool = True, after: int = 0) -> Row:
    """Return a row in which rank 2 reports a memory error two steps after its first wrong values.

    All ranks have trained with these values. They return to a clean state: no rank uses a replica,
    a snapshot or a checkpoint of a wrong step. No process ends.

    `kept`: whether there is a clean state. Without one, all ranks restart from the beginning.
    """
    wrong = step - CORRUPT + 1
    flip = Fault(2, "forward", wrong, do="flip", life=0, after=after)
    late = Fault(2, "forward", step, do="ecc", life=0)

    def release(job: Job, number: int) -> None:
        job.wait_pause(step, number + 1)
        every = job.spec.checkpoint_every
        if every:
            job.wait_event(journal.Checkpointed, step=step - step % every)
        job.release_all(number + 1)

    def is_clean(ended: Ended, incident: journal.Incident) -> None:
        (own,) = ended.of(journal.Suspected, row)
        assert (own.valid_steps, own.rank) == (wrong, 2)
        lines = [line for line in ended.job.record.lines(0) if line["step"] == step - 1]
        assert lines[0]["metrics"]["loss"] != lines[-1]["metrics"]["loss"]

    row = Row(
        f"memory error reported late in step {step}",
        wrong,
        (flip, *pause_all(step, life=0), late),
        release,
        strategies=RETRY if kept else None,
        resumed=valid_steps,
        lost=step - valid_steps,
        replaced=frozenset() if kept else EVERY,
        cause=(FaultKind.DEVICE_MEMORY, 2),
        check=is_clean,
    )
    return row


def wrong_steps(ended: Ended) -> dict[int, int]:
    """Return the steps that such errors made wrong, each with its newest suspect generation."""
    return {
        step: event.generation
        for event in ended.of(journal.Suspected)
        for step in range(event.valid_steps, event.valid_steps + CORRUPT)
    }


def fails_with(
    ranks: Sequence[int], place: str, step: int, *, after: int = 0, newer: bool = True
) -> Row:
    """Return a row with a script error that ends the attempt.

    The cause has the traceback of the first failed rank. The job writes its newest snapshot as a
    checkpoint, if it is newer than each checkpoint.
    """

    def is_named(ended: Ended, incident: journal.Incident) -> None:
        raised = [fault for fault in incident.faults if fault.traceback]
        assert {fault.rank for fault in raised} <= set(ranks)
        assert incident.cause.at == min(fault.at for fault in raised)
        assert incident.cause.message.startswith("rank ")
        assert f"{ERROR} {step}" in incident.cause.message
        assert 'train.py"' in incident.cause.traceback
        assert "runpy" not in incident.cause.traceback

    # All faults wait for the same earlier fault.
    waits = [after and after + number for number in range(len(ranks))]
    raises = "raise" if len(ranks) == 1 else "raise together"
    faults = [
        Fault(rank, place, step, do=raises, life=0, after=wait)
        for rank, wait in zip(ranks, waits, strict=True)
    ]
    of = f"rank {ranks[0]}" if len(ranks) == 1 else "all ranks"
    return Row(
        f"error of {of} at {place} of step {step}",
        step,
        tuple(faults),
        strategies=(Strategy.DUMP if step and newer else Strategy.FAIL,),
        check=is_named,
    )


def fails(*rows: Row, **settings: object) -> Attempt:
    """Return an attempt whose last row is an error of the script."""
    reason = f"{ERROR} {rows[-1].step}"
    return Attempt(rows, settings, outcome="failed", reason=reason)
