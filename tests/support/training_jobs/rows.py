"""Rows that several tables share: killed ranks, faults that break no process, the script's own."""

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
ERROR = "RuntimeError: igloo.csv: injected into step"
EVERY = frozenset(range(RANKS))  # all ranks
PASSING = {
    "hiccup": FaultKind.TRANSIENT,
    "uce": FaultKind.DEVICE_MEMORY,
    "uce-temporary": FaultKind.DEVICE_MEMORY,
}


def patient(**limits: Any) -> Policy:
    """Return a policy with limits, in which a rank that a test pauses does not hang."""
    return Policy(hang_timeout_s=LIMIT_S, **limits)


def paused(
    name: str,
    step: int,
    act: Callable[[Job], Any],
    *,
    ranks: int = RANKS,
    more: Collection[Fault] = (),
    **expected: Any,
) -> Row:
    """All ranks pause in a step; `act` is done then, and they train on.

    more: faults after the pauses.
    """

    def meanwhile(job: Job, number: int) -> Any:
        job.wait_pause(step, number)
        seen = act(job)
        job.release_all(number)
        return seen

    return Row(name, step, (*pause_all(step, ranks, life=0), *more), meanwhile, **expected)


def killed(rank: int, place: str, step: int, *, after: int = 0) -> Row:
    """A rank killed at a place of a step: its replacement takes the state of a live replica."""
    return Row(
        f"{place} of step {step}",
        step,
        (Fault(rank, place, step, life=0, after=after),),
        replaced={rank},
        cause=(FaultKind.PROCESS, rank),
        check=_from_a_peer,
    )


def _from_a_peer(ended: Ended, incident: journal.Incident) -> None:
    """The replacement has its state from a peer, all others have their own."""
    assert set(incident.sources) == {"self", "peer"}
    assert incident.cause.node == incident.cause.rank // ended.job.spec.processes_per_node


def killed_while_forming(place: str) -> Row:
    """A rank killed on its way into the first generation is replaced, or all are restarted.

    The job's policy has to allow a restart.
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
    """The killed rank has another process."""
    assert len(ended.job.record.lives(1)) > 1


def retried(how: str, rank: int, place: str, step: int, *, after: int = 0) -> Row:
    """A fault before any rank has finished the step: the same processes do it again."""
    pause, fault = held(Fault(rank, place, step, do=how, life=0))
    damaged = int(how == "uce")
    return Row(
        f"{how} at {place} of step {step}",
        step,
        (dataclasses.replace(pause, after=after), dataclasses.replace(fault, after=1)),
        lambda job, number: job.release_abreast(number, step),
        strategies=RETRY,
        resumed=step,
        cause=(PASSING[how], rank),
        sources={"self": RANKS - damaged} | ({"peer": 1} if damaged else {}),
    )


def killed_abreast(place: str, step: int, rank: int, others: int, **expected: Any) -> Row:
    """A rank killed at a place once the others have done `others` steps."""

    def release(job: Job, number: int) -> None:
        job.release_abreast(number, others)

    faults = held(Fault(rank, place, step, life=0))
    return Row(f"killed at {place}", step, faults, release, replaced={rank}, **expected)


def at_once(name: str, step: int, faults: Collection[Fault], **expected: Any) -> Row:
    """Faults of several ranks in one step, which no rank can leave before."""
    return paused(name, step, lambda job: None, more=faults, **expected)


def killed_at_once(
    name: str, step: int, ranks: Collection[int], *, of: int = RANKS, **expected: Any
) -> Row:
    """Some of the ranks killed from outside at one moment, while all are in the same step."""

    def is_one(ended: Ended, incident: journal.Incident) -> None:
        assert len(ended.incidents_of(killed)) == 1

    expected |= {"strategies": None, "replaced": ranks, "check": is_one}
    killed = paused(name, step, kill(*ranks), ranks=of, **expected)
    return killed


CORRUPT = 3  # steps that are wrong when an error of the memory is reported late


def reported_late(step: int, *, clean: int, kept: bool = True, after: int = 0) -> Row:
    """Rank 2 reports an error of its memory two steps after it has begun to compute wrong values.

    All ranks have trained with these values. They return to a clean state: no rank takes a replica,
    a snapshot or a checkpoint of a wrong step. No process ends.

    kept: False where there is no clean state. All ranks begin again then.
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
        assert (own.clean, own.rank) == (wrong, 2)
        lines = [line for line in ended.job.record.lines(0) if line["step"] == step - 1]
        assert lines[0]["metrics"]["loss"] != lines[-1]["metrics"]["loss"]

    row = Row(
        f"memory error reported late in step {step}",
        wrong,
        (flip, *pause_all(step, life=0), late),
        release,
        strategies=RETRY if kept else None,
        resumed=clean,
        lost=step - clean,
        replaced=frozenset() if kept else EVERY,
        cause=(FaultKind.DEVICE_MEMORY, 2),
        check=is_clean,
    )
    return row


def wrong_steps(ended: Ended) -> dict[int, int]:
    """Return the steps that such errors made wrong, each with the newest generation in question."""
    return {
        step: event.generation
        for event in ended.of(journal.Suspected)
        for step in range(event.clean, event.clean + CORRUPT)
    }


def fails_with(
    ranks: Sequence[int], place: str, step: int, *, after: int = 0, newer: bool = True
) -> Row:
    """An error of the script ends the attempt once, with the traceback of the first failing rank.

    The job writes its newest snapshot as a checkpoint, if it is newer than every checkpoint.
    """

    def is_named(ended: Ended, incident: journal.Incident) -> None:
        raised = [fault for fault in incident.faults if fault.traceback]
        assert {fault.rank for fault in raised} <= set(ranks)
        assert incident.cause.at == min(fault.at for fault in raised)
        assert incident.cause.message.startswith("rank ")
        assert f"{ERROR} {step}" in incident.cause.message
        assert 'train.py"' in incident.cause.traceback
        assert "runpy" not in incident.cause.traceback

    # All of them wait for the same fault.
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
    """An attempt whose last row is an error of the script."""
    reason = f"{ERROR} {rows[-1].step}"
    return Attempt(rows, settings, outcome="failed", reason=reason)
