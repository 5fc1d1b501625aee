"""A fault inside a step that ends no process: all processes stay, and no step is lost."""

from __future__ import annotations

import pytest
from training_jobs import LONG, RANKS
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.injection import Fault
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import EVERY, PASSING, at_once, patient, retried

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy


def fault(rank: int, place: str, step: int | None, do: str, after: int = 0) -> Fault:
    """Return a fault of a rank that may have been replaced before."""
    return Fault(rank, place, step, do=do, life=0, after=after)


def torn(how: str, place: str, step: int) -> Row:
    """Return the row: a rank torn inside its update gets the state of the others.

    Step n+1 follows if one of them has finished step n.
    """
    return Row(
        f"{how} at {place}",
        step,
        (fault(2, place, step, how),),
        strategies=(Strategy.RETRY,),
        resumed=(step, step + 1),
        check=from_a_peer,
    )


def from_a_peer(ended: Ended, incident: journal.Incident) -> None:
    """Check that a rank got its state from a peer."""
    assert "peer" in incident.sources


def at_an_edge(how: str, place: str, step: int) -> Row:
    """Return the row of a fault before the step's body, before its update, or after the step."""
    name = f"{how} at {place}"
    return Row(name, step, (fault(2, place, step, how),), strategies=(Strategy.RETRY,))


def while_state_is_sent(name: str, rank: int, place: str, step: int, replaced: set[int]) -> Row:
    """Return the row: a second device fails during the recovery."""

    def of_devices(ended: Ended, incident: journal.Incident) -> None:
        assert {fault.kind for fault in incident.faults} >= {FaultKind.DEVICE_MEMORY}

    faults = fault(1, "forward", step, "uce"), fault(rank, place, None, "uce", after=1)
    return Row(name, step, faults, strategies=None, replaced=replaced, check=of_devices)


def that_a_retry_does_not_end(how: str, step: int) -> Row:
    """Return the row: after the same fault in the retry only that rank is replaced."""
    again = fault(1, "backward", step, how), fault(1, "backward", step, how, after=1)
    decided = Strategy.RETRY, Strategy.RECOVER_IN_PLACE
    return Row(f"{how} again after a retry", step, again, strategies=decided, replaced={1})


def beyond_repair(ended: Ended, incident: journal.Incident) -> None:
    """Check that the rank reports its memory first, and its device after the failed repair."""
    of_rank = [fault.kind for fault in incident.faults if fault.rank == 3]
    assert of_rank == [FaultKind.DEVICE_MEMORY, FaultKind.DEVICE]
    assert incident.strategy is Strategy.RECOVER_IN_PLACE


def raised(ended: Ended, incident: journal.Incident) -> None:
    """Check that the incident names the error of the script."""
    assert "injected into step" in incident.cause.message


BOTH = "uce", "uce-temporary"
STEPS = iter(range(4, LONG, 3))
DDP = Plan(
    "ddp",
    (
        Attempt(
            (
                retried("hiccup", 0, "forward", 0),
                retried("uce", 1, "forward", 0, after=1),
                retried("uce-temporary", 2, "forward", 0, after=1),
                *(retried(how, 1, "forward", next(STEPS)) for how in PASSING),
                *(retried(how, 2, "backward", next(STEPS)) for how in PASSING),
                *(torn(how, "update", next(STEPS)) for how in PASSING),
                *(torn(how, "updated", next(STEPS)) for how in PASSING),
                *(at_an_edge(how, "keep buffers", next(STEPS)) for how in BOTH),
                *(at_an_edge(how, "wait", next(STEPS)) for how in BOTH),
                *(at_an_edge(how, "keep state", next(STEPS)) for how in BOTH),
                while_state_is_sent("the sender's memory fails", 0, "send", 60, set()),
                while_state_is_sent("the receiver's memory fails again", 1, "receive", 64, {1}),
                that_a_retry_does_not_end("hiccup", 68),
                that_a_retry_does_not_end("uce", 72),
                Row(
                    "device that cannot be repaired",
                    76,
                    (fault(3, "forward", 76, "uce-fatal"),),
                    strategies=None,
                    replaced={3},
                    check=beyond_repair,
                ),
                Row(
                    "damaged rank and a killed one",
                    80,
                    (fault(1, "forward", 80, "uce"), fault(2, "forward", 80, "kill")),
                    strategies=None,
                    replaced={2},
                ),
                Row(
                    "rank killed while a damaged one takes its state",
                    84,
                    (
                        fault(1, "forward", 84, "uce"),
                        fault(2, "after StateReady", None, "kill", after=1),
                    ),
                    strategies=None,
                    replaced={2},
                ),
                at_once(
                    "several ranks at once",
                    88,
                    [fault(rank, "forward", 88, "uce") for rank in (0, 1, 2)],
                    strategies=None,
                    sources={"self": RANKS - 3, "peer": 3},
                ),
                at_once(
                    "all ranks at once",
                    92,
                    [fault(rank, "forward", 92, "uce") for rank in EVERY],
                    strategies=None,
                    lost=2,
                    sources={"snapshot": 1, "peer": 3},
                ),
                Row(
                    # The error came after the start of the last update, so that no other rank is
                    # suspicious.
                    "memory error of this step",
                    96,
                    (fault(2, "between", 96, "flip"), fault(2, "forward", 96, "ecc", after=1)),
                    strategies=(Strategy.RETRY,),
                    check=from_a_peer,
                ),
                Row(
                    "error of the script is not retried",
                    100,
                    (fault(1, "forward", 100, "raise"),),
                    strategies=(Strategy.DUMP,),
                    check=raised,
                ),
            ),
            outcome="failed",
            reason="injected into step 100",
        ),
        Attempt(
            (
                Row(
                    "retry that is not allowed",
                    106,
                    (fault(1, "forward", 106, "uce"),),
                    replaced={1},
                ),
            ),
            settings={"policy": patient(strategies=(Strategy.RECOVER_IN_PLACE,))},
        ),
    ),
    steps=LONG,
)


@pytest.mark.parametrize(("plan", "row"), each_row(DDP))
def test_fault_inside_a_step(plan: Plan, row: Row, ended_of: EndedOf) -> None:
    """A fault loses no step while a replica is intact, and no intact process."""
    ended_of(plan).check(row)


def test_end(ended_of: EndedOf, baseline_of: Baselines) -> None:
    """The job's training after all faults equals that of an undisturbed job."""
    ended_of(DDP).check_end(baseline_of("ddp", RANKS, LONG))
