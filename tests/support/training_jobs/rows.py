"""Rows that several tables share: killed ranks, and faults that break no process."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Strategy
from training_jobs import RANKS
from training_jobs.injection import Fault, held
from training_jobs.job import Job, pause_all
from training_jobs.sequence import Act, Ended, Row

EVERY = frozenset(range(RANKS))  # all ranks
PASSING = {
    "hiccup": Kind.TRANSIENT,
    "uce": Kind.DEVICE_MEMORY,
    "uce-temporary": Kind.DEVICE_MEMORY,
}


def killed(rank: int, place: str, step: int, *, after: int = 0) -> Row:
    """A rank killed at a place of a step: its replacement takes the state of a live replica."""
    return Row(
        f"{place} of step {step}",
        step,
        (Fault(rank, place, step, life=0, after=after),),
        replaced={rank},
        cause=(Kind.PROCESS, rank),
        check=_from_a_peer,
    )


def _from_a_peer(ended: Ended, incident: journal.Incident) -> None:
    """The replacement has its state from a peer, all others have their own."""
    assert set(incident.sources) == {"self", "peer"}
    assert incident.faults[0].node == 0


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
        strategies=(Strategy.RETRY,),
        resumed=step,
        cause=(PASSING[how], rank),
        sources={"self": RANKS - damaged} | ({"peer": 1} if damaged else {}),
    )


def at_once(name: str, step: int, faults: Collection[Fault], **row: object) -> Row:
    """Faults of several ranks in one step, which no rank can leave before."""
    pauses = [dataclasses.replace(each, life=0) for each in pause_all(step)]
    return Row(name, step, (*pauses, *faults), _release_together(step), **row)


def killed_at_once(name: str, step: int, ranks: Collection[int], **row: object) -> Row:
    """Ranks killed from outside at one moment, while all are in the same step."""
    pauses = tuple(dataclasses.replace(each, life=0) for each in pause_all(step))

    def kill(job: Job, number: int) -> None:
        job.wait_pause(step, number)
        job.kill(*ranks)
        job.release_all(number)

    return Row(name, step, pauses, kill, replaced=ranks, **row)


def _release_together(step: int) -> Act:
    def release(job: Job, number: int) -> None:
        job.wait_pause(step, number)
        job.release_all(number)

    return release
