"""Decisions: a table of the rules, with words of their reasons."""

from __future__ import annotations

import msgspec
import pytest
from decisions import fault, judge

from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.faults.fault import FaultKind as Kind
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import INNER, Policy, Strategy

RETRY, IN_PLACE = Strategy.RETRY, Strategy.RECOVER_IN_PLACE
RECOVER, SHRINK = Strategy.RECOVER, Strategy.SHRINK
HANG_RESTART, RESTART = Strategy.HANG_RESTART, Strategy.RESTART
POD, ISOLATED = Strategy.RESCHEDULE_POD, Strategy.RESCHEDULE_JOB_ISOLATED
JOB = Strategy.RESCHEDULE_JOB
DUMP, FAIL = Strategy.DUMP, Strategy.FAIL

USER, DEAD, LINK = fault(Kind.USER_CODE), fault(Kind.PROCESS), fault(Kind.LINK)
MEMORY = fault(Kind.DEVICE_MEMORY)
FREE = Policy(max_restarts=1)
NO_RESTART = Policy(max_restarts=0)
XID_13 = [
    Fault(kind=Kind.PROCESS, message="XID 13", rank=0, node=0, device=0, code="13", at=float(at))
    for at in range(3)
]
NOT_RESET = Fault(kind=Kind.DEVICE, message="no use", rank=0, node=0, reset_failed=True)
STARTING = {"session": False, "starting": True, "formed": False}

TABLE = {
    # name: (policy, fault, past, special settings of the situation, strategy, words of the reason)
    "a dead process": (FREE, DEAD, [], {}, IN_PLACE, "restarts the rank on its node"),
    "a stuck rank": (FREE, fault(Kind.STUCK), [], {}, IN_PLACE, "all other ranks wait"),
    "a lost node": (FREE, fault(Kind.NODE_LOST), [], {}, RECOVER, "a new node replaces it"),
    "a lost node, and a spare": (
        FREE, fault(Kind.NODE_LOST), [], {"spares": 1}, RECOVER, "a spare replaces it",
    ),
    "a lost node, and enough are left": (
        FREE, fault(Kind.NODE_LOST), [], {"left": 3}, SHRINK, "the world continues with 3 nodes",
    ),
    "a lost node, enough are left, and a spare": (
        FREE, fault(Kind.NODE_LOST), [], {"left": 3, "spares": 1}, RECOVER, "a spare replaces",
    ),
    "a lost node, enough are left, shrink not allowed": (
        Policy(strategies=(RECOVER,)), fault(Kind.NODE_LOST), [], {"left": 3},
        RECOVER, "there is no spare, so a new node replaces it",
    ),
    "nothing left, but a snapshot": (
        NO_RESTART, USER, [], {"final_step": 3}, DUMP,
        "0 of 0 restarts are used; final checkpoint: the nodes write the snapshot of step 3",
    ),
    "nothing left, final checkpoint not allowed": (
        Policy(strategies=INNER), USER, [], {"final_step": 3}, FAIL, "restart is not allowed",
    ),
    "something left, and a snapshot": (
        FREE, USER, [], {"final_step": 3}, RESTART, "restart 1 of 1",
    ),
    "a broken link": (FREE, LINK, [], {}, RETRY, "repeat the step"),
    "damaged memory": (
        FREE, MEMORY, [], {}, RETRY, "all processes continue",
    ),
    "a hiccup": (FREE, fault(Kind.TRANSIENT), [], {}, RETRY, "repeat the step"),
    "damaged memory, retry not allowed": (
        Policy(strategies=(IN_PLACE,)), MEMORY, [], {}, IN_PLACE, "retry is not allowed; the agent",
    ),
    "damaged memory again at once": (
        FREE, MEMORY, [(MEMORY, RETRY)], {},
        IN_PLACE, "the problem returned after retry; the agent restarts the rank on its node",
    ),
    "damaged memory again, only retry allowed": (
        Policy(strategies=(RETRY,)), MEMORY, [(MEMORY, RETRY)],
        {}, RETRY, "the rank repairs its device",
    ),
    "damaged memory again some steps later": (
        FREE, MEMORY, [(fault(Kind.DEVICE_MEMORY, finished=4), RETRY)], {},
        RETRY, "the rank repairs its device",
    ),
    "damaged memory of another rank": (
        FREE, fault(Kind.DEVICE_MEMORY, 1), [(MEMORY, RETRY)], {},
        RETRY, "the rank repairs its device",
    ),
    "a device that cannot be repaired": (
        FREE, fault(Kind.DEVICE), [(MEMORY, RETRY)], {}, IN_PLACE, "restarts",
    ),
    "a bad source": (FREE, fault(Kind.RESTORE), [], {}, RETRY, "the next source"),
    "no session": (FREE, DEAD, [], {"session": False}, RESTART, "without a Session"),
    "nothing formed yet": (FREE, DEAD, [], {"formed": False}, RESTART, "not formed a generation"),
    "no session, no restart": (NO_RESTART, DEAD, [], {"session": False}, FAIL, "0 of 0 restarts"),
    "a strategy that is not allowed": (
        Policy(strategies=(RETRY, RESTART), max_restarts=1), DEAD, [], {}, RESTART,
        "recover-in-place is not allowed; recover is not allowed; the job restarts all ranks "
        "(restart 1 of 1)",
    ),
    "cannot be chosen at all": (
        Policy(strategies=()), LINK, [], {}, FAIL,
        "retry is not allowed; restart is not allowed",
    ),
    "two that are not allowed": (
        Policy(strategies=()), MEMORY, [], {}, FAIL,
        "retry is not allowed; recover-in-place is not allowed; recover is not allowed; restart",
    ),
    "an error of the script": (FREE, USER, [], {}, RESTART, "restart 1 of 1"),
    "an error, no restart": (NO_RESTART, USER, [], {}, FAIL, "0 of 0 restarts are used"),
    "restarts used up, but the job may be placed anew": (
        Policy(max_restarts=1, max_reschedules=2), USER, [(fault(Kind.USER_CODE, 1), RESTART)], {},
        JOB, "1 of 1 restarts are used; the platform places the whole job again",
    ),
    "nobody who could place the job anew": (
        Policy(max_restarts=0, max_reschedules=2), USER, [], {"engine": ()}, FAIL,
        "not support reschedule-job",
    ),
    "a lost node, and a limit for pods that no strategy reads": (
        Policy(strategies=(RESTART,), max_restarts=1, max_pod_reschedules=2),
        fault(Kind.NODE_LOST), [], {}, RESTART, "restart 1 of 1",
    ),
    "a rank may only be recovered on another node": (
        Policy(strategies=(RECOVER,)), DEAD, [], {"spares": 1},
        RECOVER, "recover-in-place is not allowed; a spare replaces it",
    ),
    "another order": (
        Policy(strategies=(RECOVER, IN_PLACE)), DEAD, [], {"spares": 1},
        RECOVER, "a spare replaces it",
    ),
    "a hang with its culprit": (FREE, fault(Kind.HANG), [], {}, IN_PLACE, "restarts"),
    "the same rank hangs again at once": (
        FREE, fault(Kind.HANG),
        [*[(fault(Kind.HANG), IN_PLACE)] * 3, (fault(Kind.HANG), RECOVER)], {}, HANG_RESTART,
        "on another node, but has not finished a step since then; the agents restart all processes",
    ),
    "what did not last in its place": (
        FREE, DEAD, [(DEAD, IN_PLACE)] * 3, {"spares": 1},
        RECOVER, "without a finished step in between; a spare replaces it",
    ),
    "nor on another node": (
        FREE, DEAD, [*[(DEAD, IN_PLACE)] * 3, (DEAD, RECOVER)], {"spares": 1},
        RESTART, "has not finished a step since then; the job restarts all ranks",
    ),
    "an eviction": (FREE, fault(Kind.EVICTION), [], {}, RECOVER, "a new node replaces it"),
    "an eviction, when all budgets are used": (
        Policy(max_recoveries=0, max_reschedules=0), fault(Kind.EVICTION), [],
        {"session": False}, POD, "only its pod again",
    ),
    "restarts used up": (
        FREE, USER, [(fault(Kind.USER_CODE, 1), RESTART)], {}, FAIL, "1 of 1 restarts are used",
    ),
    "the same error again": (
        Policy(max_restarts=9), USER, [(USER, RESTART)], {}, FAIL, "the script is the likely cause",
    ),
    "the same error at another step": (
        Policy(max_restarts=9), USER, [(fault(Kind.USER_CODE, finished=4), RESTART)], {},
        RESTART, "restart 2 of 9",
    ),
    "another error": (
        Policy(max_restarts=9), USER, [(fault(Kind.USER_CODE, signature="F"), RESTART)], {},
        RESTART, "restart 2 of 9",
    ),
    "the same signal after a restart": (FREE, DEAD, [(DEAD, RESTART)], {}, IN_PLACE, "restarts"),
    "three times in a row": (FREE, DEAD, [(DEAD, IN_PLACE)] * 3, {}, RECOVER, "3 times without"),
    "three times in a row, and once elsewhere": (
        FREE, DEAD, [*[(DEAD, IN_PLACE)] * 3, (DEAD, RECOVER)], {}, RESTART, "on another node",
    ),
    "three times with a step between": (
        FREE, DEAD, [(fault(Kind.PROCESS, finished=4), IN_PLACE)] * 3, {}, IN_PLACE, "restarts",
    ),
    "three times at another place": (
        FREE, DEAD, [(fault(Kind.PROCESS, rank=1), IN_PLACE)] * 3, {}, IN_PLACE, "restarts",
    ),
    "three sources that failed": (
        FREE, fault(Kind.RESTORE, signature="D"),
        [(fault(Kind.RESTORE, signature=tried), RETRY) for tried in "ABC"], {},
        RETRY, "the rank tries the next source of its state",
    ),
    "one source that failed three times": (
        FREE, fault(Kind.RESTORE), [(fault(Kind.RESTORE), RETRY)] * 3, {}, RESTART, "3 times",
    ),
    "too many recoveries": (
        Policy(max_recoveries=2, max_restarts=1), DEAD,
        [(fault(Kind.PROCESS, finished=1), IN_PLACE), (fault(Kind.LINK, finished=2), RETRY)], {},
        RESTART, "2 of 2 recoveries are used; the job restarts all ranks",
    ),
    "the same error, and an older checkpoint, but no restart is allowed": (
        Policy(strategies=(JOB,), max_restarts=9, max_reschedules=9), USER, [(USER, JOB)],
        {"older": True}, FAIL, "the script is the likely cause",
    ),
    "a lost node, and the whole job may be placed anew, no more": (
        Policy(strategies=(JOB,), max_reschedules=2), fault(Kind.NODE_LOST), [], {}, JOB,
        "the platform places the whole job again",
    ),
    "a sick node, when a job is placed anew only without it": (
        Policy(strategies=(JOB, ISOLATED), max_reschedules=2), fault(Kind.NODE), [], {}, ISOLATED,
        "without that node",
    ),
    "damaged memory again, and only another node is stronger": (
        Policy(strategies=(RETRY, RECOVER)), MEMORY, [(MEMORY, RETRY)], {}, RECOVER,
        "the problem returned after retry; ",
    ),
    "damaged memory again, and only a restart is stronger": (
        Policy(strategies=(RETRY, RESTART), max_restarts=1), MEMORY, [(MEMORY, RETRY)], {},
        RESTART, "the problem returned after retry; ",
    ),
    "damaged memory again, and the stronger are used up": (
        Policy(strategies=(RETRY, RESTART), max_restarts=1), MEMORY,
        [(fault(Kind.USER_CODE, 1), RESTART), (MEMORY, RETRY)], {}, RETRY, "repairs its device",
    ),
    "evicted again and again, and only inner strategies are allowed": (
        Policy(strategies=INNER), fault(Kind.EVICTION), [(fault(Kind.EVICTION), RECOVER)] * 9, {},
        RECOVER, "a new node replaces it",
    ),
    "a crash after evictions of its node": (
        Policy(strategies=INNER), DEAD, [(fault(Kind.EVICTION), RECOVER)] * 9, {}, IN_PLACE,
        "restarts",
    ),
    "an XID that a program causes, again and again": (
        Policy(max_restarts=10), XID_13[2], [(seen, RESTART) for seen in XID_13[:2]],
        {"session": False}, RESTART, "restart 3 of 10",
    ),
    "hangs and crashes in turn": (
        Policy(max_restarts=9, strategies=(HANG_RESTART, RESTART)), fault(Kind.HANG),
        [(fault(Kind.HANG), HANG_RESTART), (fault(Kind.USER_CODE, 1), RESTART)] * 3, {},
        HANG_RESTART, "the agents restart all processes",
    ),
    "a hang in the start": (
        NO_RESTART, fault(Kind.HANG), [], STARTING, HANG_RESTART, "restart all processes",
    ),
    "a hang in the start, hang-restart spent": (
        Policy(max_restarts=9, max_hangs_in_row=1), fault(Kind.HANG),
        [(fault(Kind.HANG), HANG_RESTART)], STARTING, FAIL, "it hung 1 consecutive times",
    ),
    "a hang in the start, hang-restart not allowed": (
        Policy(strategies=(RESTART,), max_restarts=0), fault(Kind.HANG), [], STARTING,
        RESTART, "because they do not train together (restart 1 of 3",
    ),
    "a hang without a Session, hang-restart not allowed": (
        Policy(strategies=(RESTART,), max_restarts=9), fault(Kind.HANG), [], {"session": False},
        FAIL, "hang-restart is not allowed",
    ),
    "a device that could not be reset, of which no code is known": (
        Policy(max_restarts=9), NOT_RESET, [], {}, RECOVER, "a reset cannot repair its device; ",
    ),
    "what did not last on the only node, which has the only snapshot": (
        NO_RESTART, DEAD, [(DEAD, IN_PLACE)] * 3, {"alone": True, "final_step": 4}, Strategy.DUMP,
        "step 4 is only in the memory of its node; 0 of 0 restarts are used; final checkpoint",
    ),
    "what did not last on the only node, and a checkpoint is as new": (
        NO_RESTART, DEAD, [(DEAD, IN_PLACE)] * 3, {"alone": True}, RECOVER, "a new node",
    ),
    "the only node is sick": (
        FREE, fault(Kind.NODE), [], {"alone": True, "final_step": 4}, RECOVER, "a new node",
    ),
    "nothing could be started": (FREE, fault(Kind.LAUNCH), [], {}, FAIL, "launch of rank 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_rules(name: str) -> None:
    """Each fault with its history causes the strategy in the table, with these words as reason."""
    policy, what, past, special, strategy, words = TABLE[name]
    decision = judge(what, past, policy, **special)
    assert decision.strategy is strategy
    assert words in decision.reason
    assert what.message in decision.reason


# The first strategy for each kind of fault. A new strategy that is on by default changes a row.
FIRST = {
    Kind.PROCESS: IN_PLACE,
    Kind.USER_CODE: RESTART,
    Kind.LINK: RETRY,
    Kind.TRANSIENT: RETRY,
    Kind.DEVICE_MEMORY: RETRY,
    Kind.DEVICE: IN_PLACE,
    Kind.NODE_LOST: RECOVER,
    Kind.STUCK: IN_PLACE,
    Kind.HANG: IN_PLACE,
    Kind.RESTORE: RETRY,
    Kind.COORDINATOR: RETRY,
    Kind.STORAGE: RESTART,
    Kind.SOURCE: RESTART,
    Kind.SKIPPED_STEP: RESTART,  # the product never asks for a decision about it
    Kind.REPLICAS: FAIL,  # without a state from before the difference
    Kind.PLANNED: RESTART,  # the product never asks for a decision about it
    Kind.LAUNCH: FAIL,
    Kind.HOST_OOM: IN_PLACE,
    Kind.DEVICE_OOM: IN_PLACE,
    Kind.NODE: RECOVER,
    Kind.STRAGGLER: RECOVER,
    Kind.EVICTION: RECOVER,
    Kind.SCHEDULING: FAIL,
    Kind.UNKNOWN: IN_PLACE,
}


@pytest.mark.parametrize("kind", Kind)
def test_the_first_strategy_of_each_kind(kind: Kind) -> None:
    """Each kind of fault has its first strategy in a job with a Session and one restart."""
    assert judge(fault(kind), [], FREE).strategy is FIRST[kind]


def test_the_same_error_from_the_same_checkpoint_rolls_back_once() -> None:
    """The same error from the same checkpoint causes one return to an older checkpoint.

    If that does not help, the script is the cause, and the job fails.
    """
    policy, past = Policy(max_restarts=9), ()
    decisions = []
    for resumed in (0, 4, 4, 3):  # the start; twice the checkpoint of step 4; the one of step 3
        situation = Situation(
            fault=USER, session=True, formed=True, newest=5, resumed=resumed, older=resumed > 0,
            past=past,
        )  # fmt: skip
        decision = decide(policy, situation)
        decisions.append((decision.strategy, decision.roll_back))
        past = (*past, Past(
            fault=USER, strategy=decision.strategy, newest=5, resumed=resumed,
            rolled_back=decision.roll_back,
        ))  # fmt: skip
    assert decisions == [(RESTART, False), (RESTART, False), (RESTART, True), (RESTART, False)]
    last = decide(policy, Situation(
        fault=USER, session=True, formed=True, newest=5, resumed=3, older=True, past=past,
    ))  # fmt: skip
    assert last.strategy is FAIL
    assert (
        "and also after a start from an older checkpoint; the script is the likely cause"
        in last.reason
    )


def test_a_strategy_that_a_person_must_approve() -> None:
    """Only the decision for a strategy that needs approval waits for a person."""
    policy = Policy(max_restarts=1, approve=(RESTART,))
    assert judge(USER, [], policy).approval
    assert not judge(DEAD, [], policy).approval


def test_a_rank_that_lags_and_dies_at_its_start_is_not_started_for_ever() -> None:
    """Recoveries without progress count even if the dead rank was one step behind."""
    lagging = fault(Kind.PROCESS, finished=4)
    past: tuple[Past, ...] = ()
    while (decision := decide(NO_RESTART, lag(lagging, past))).strategy in INNER:
        past = (*past, Past(fault=lagging, strategy=decision.strategy, newest=5))
        assert len(past) <= Policy().max_in_row + 1  # once on another node
    assert decision.strategy is FAIL


def lag(what: Fault, past: tuple[Past, ...]) -> Situation:
    """Return a situation in which the healthy ranks are at step 5."""
    return Situation(fault=what, session=True, formed=True, newest=5, past=past)


def test_ranks_that_hang_at_the_same_time_are_one_hang() -> None:
    """Ranks that hang at the same time are one hang, and each restarts on its node."""
    hangs = [msgspec.structs.replace(fault(Kind.HANG, rank), at=7.0) for rank in range(8)]
    past: list[tuple[Fault, Strategy]] = []
    for what in hangs:
        assert judge(what, past, FREE).strategy is IN_PLACE
        past.append((what, IN_PLACE))
    later = msgspec.structs.replace(fault(Kind.HANG, 8), at=8.0)
    assert judge(later, past, Policy(max_in_row=2)).strategy is IN_PLACE
    assert judge(later, past, Policy(max_in_row=1)).strategy is HANG_RESTART
