"""Decisions: the rules as a table, and that no sequence of faults is answered for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.fault import ErrorRecord, Exit, Fault, Kind, fault_of_exit, root_cause
from rekindle.recovery.policy import INNER, Case, Decision, Past, Policy, Strategy, decide

RETRY, IN_PLACE, RECOVER, SHRINK, RESTART, DUMP, FAIL = Strategy
RUNTIME = (
    Kind.PROCESS,
    Kind.STUCK,
    Kind.RESTORE,
    Kind.NODE_LOST,
    Kind.LINK,
    Kind.TRANSIENT,
    Kind.DEVICE_MEMORY,
    Kind.DEVICE,
)


def fault(kind: Kind, rank: int = 0, finished: int = 5, signature: str = "E") -> Fault:
    text = f"{kind.value} of rank {rank}"
    return Fault(kind=kind, message=text, rank=rank, node=0, finished=finished, signature=signature)


def judge(what: Fault, past: list[tuple[Fault, Strategy]], policy: Policy, **more: Any) -> Decision:
    """Decide about a fault of a job that trains through a Session, if nothing else is said."""
    settings = {"session": True, "formed": True, "newest": 5} | more
    before = tuple(Past(fault=seen, strategy=chosen, newest=seen.finished) for seen, chosen in past)
    return decide(policy, Case(fault=what, past=before, **settings))


USER, DEAD, LINK = fault(Kind.USER_CODE), fault(Kind.PROCESS), fault(Kind.LINK)
MEMORY = fault(Kind.DEVICE_MEMORY)
FREE = Policy(max_restarts=1)

TABLE = {
    # name: (policy, fault, past, what is special about the case, strategy, words of the reason)
    "a dead process": (FREE, DEAD, [], {}, IN_PLACE, "started anew on its node"),
    "a stuck rank": (FREE, fault(Kind.STUCK), [], {}, IN_PLACE, "all others wait"),
    "a lost node": (FREE, fault(Kind.NODE_LOST), [], {}, RECOVER, "a new node takes its place"),
    "a lost node, and a spare": (
        FREE, fault(Kind.NODE_LOST), [], {"spares": 1}, RECOVER, "a spare takes its place",
    ),
    "a lost node, and enough are left": (
        FREE, fault(Kind.NODE_LOST), [], {"left": 3}, SHRINK, "the world goes on with 3 nodes",
    ),
    "a lost node, enough are left, and a spare": (
        FREE, fault(Kind.NODE_LOST), [], {"left": 3, "spares": 1}, RECOVER, "a spare takes",
    ),
    "a lost node, enough are left, shrink not allowed": (
        Policy(strategies=(RECOVER,)), fault(Kind.NODE_LOST), [], {"left": 3},
        RECOVER, "shrink is not allowed; there is no spare: a new node takes its place",
    ),
    "nothing left, but a snapshot": (
        Policy(), USER, [], {"last_words": 3}, DUMP,
        "0 of 0 restarts are used; last words: the snapshot of step 3 is to be written",
    ),
    "nothing left, last words not allowed": (
        Policy(strategies=INNER), USER, [], {"last_words": 3}, FAIL, "0 of 0 restarts are used",
    ),
    "something left, and a snapshot": (
        FREE, USER, [], {"last_words": 3}, RESTART, "restart 1 of 1",
    ),
    "a broken link": (FREE, LINK, [], {}, RETRY, "do the step again"),
    "damaged memory": (
        FREE, MEMORY, [], {}, RETRY, "every process stays",
    ),
    "a hiccup": (FREE, fault(Kind.TRANSIENT), [], {}, RETRY, "do the step again"),
    "damaged memory, retry not allowed": (
        Policy(strategies=(IN_PLACE,)), MEMORY, [], {}, IN_PLACE, "retry is not allowed; the rank",
    ),
    "damaged memory again at once": (
        FREE, MEMORY, [(MEMORY, RETRY)], {},
        IN_PLACE, "retry did not last; the rank is started anew on its node",
    ),
    "damaged memory again, only retry allowed": (
        Policy(strategies=(RETRY,)), MEMORY, [(MEMORY, RETRY)],
        {}, RETRY, "its device is repaired",
    ),
    "damaged memory again some steps later": (
        FREE, MEMORY, [(fault(Kind.DEVICE_MEMORY, finished=4), RETRY)], {},
        RETRY, "its device is repaired",
    ),
    "damaged memory of another rank": (
        FREE, fault(Kind.DEVICE_MEMORY, 1), [(MEMORY, RETRY)], {},
        RETRY, "its device is repaired",
    ),
    "a device that cannot be repaired": (
        FREE, fault(Kind.DEVICE), [(MEMORY, RETRY)], {}, IN_PLACE, "started anew",
    ),
    "a bad source": (FREE, fault(Kind.RESTORE), [], {}, RETRY, "the next source"),
    "no session": (FREE, DEAD, [], {"session": False}, RESTART, "without a Session"),
    "nothing formed yet": (FREE, DEAD, [], {"formed": False}, RESTART, "have not met yet"),
    "no session, no restart": (Policy(), DEAD, [], {"session": False}, FAIL, "0 of 0 restarts"),
    "a strategy that is not allowed": (
        Policy(strategies=(RETRY,), max_restarts=1), DEAD, [], {}, RESTART,
        "recover-in-place is not allowed; all ranks are started anew (restart 1 of 1)",
    ),
    "cannot be chosen at all": (
        Policy(strategies=()), LINK, [], {}, FAIL, "retry is not allowed; 0 of 0 restarts are used",
    ),
    "two that are not allowed": (
        Policy(strategies=()), MEMORY, [], {}, FAIL,
        "retry is not allowed; recover-in-place is not allowed; 0 of 0",
    ),
    "an error of the script": (FREE, USER, [], {}, RESTART, "restart 1 of 1"),
    "an error, no restart": (Policy(), USER, [], {}, FAIL, "0 of 0 restarts are used"),
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
    "the same signal after a restart": (FREE, DEAD, [(DEAD, RESTART)], {}, IN_PLACE, "anew"),
    "three times in a row": (FREE, DEAD, [(DEAD, IN_PLACE)] * 3, {}, RESTART, "recovered 3 times"),
    "three times with a step between": (
        FREE, DEAD, [(fault(Kind.PROCESS, finished=4), IN_PLACE)] * 3, {}, IN_PLACE, "anew",
    ),
    "three times at another place": (
        FREE, DEAD, [(fault(Kind.PROCESS, rank=1), IN_PLACE)] * 3, {}, IN_PLACE, "anew",
    ),
    "three sources that failed": (
        FREE, fault(Kind.RESTORE, signature="D"),
        [(fault(Kind.RESTORE, signature=tried), RETRY) for tried in "ABC"], {},
        RETRY, "the next source of its state is tried",
    ),
    "one source that failed three times": (
        FREE, fault(Kind.RESTORE), [(fault(Kind.RESTORE), RETRY)] * 3, {}, RESTART, "3 times",
    ),
    "too many recoveries": (
        Policy(max_recoveries=2, max_restarts=1), DEAD,
        [(fault(Kind.PROCESS, finished=1), IN_PLACE), (fault(Kind.LINK, finished=2), RETRY)], {},
        RESTART, "2 of 2 recoveries are used; all ranks are started anew",
    ),
    "nothing could be started": (FREE, fault(Kind.LAUNCH), [], {}, FAIL, "launch of rank 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_rules(name: str) -> None:
    """Each fault with its history is answered as the table says, with its reason in words."""
    policy, what, past, special, strategy, words = TABLE[name]
    decision = judge(what, past, policy, **special)
    assert decision.strategy is strategy
    assert words in decision.reason
    assert what.message in decision.reason


def test_a_rank_that_lags_and_dies_at_its_start_is_not_started_for_ever() -> None:
    """Recoveries without progress are counted also when the dead rank was a step behind."""
    lagging = fault(Kind.PROCESS, finished=4)
    past: tuple[Past, ...] = ()
    while (decision := decide(Policy(), lag(lagging, past))).strategy in INNER:
        past = (*past, Past(fault=lagging, strategy=decision.strategy, newest=5))
        assert len(past) <= Policy().max_in_row
    assert decision.strategy is FAIL


def lag(what: Fault, past: tuple[Past, ...]) -> Case:
    """A case in which the healthy ranks are at step 5."""
    return Case(fault=what, session=True, formed=True, newest=5, past=past)


faults = st.builds(
    fault,
    kind=st.sampled_from([Kind.USER_CODE, Kind.LAUNCH, *RUNTIME]),
    rank=st.integers(0, 3),
    finished=st.integers(0, 6),
    signature=st.sampled_from("EFG"),
)
policies = st.builds(
    Policy,
    strategies=st.lists(st.sampled_from(INNER), unique=True).map(tuple),
    max_restarts=st.integers(0, 4),
    max_recoveries=st.integers(0, 8),
    max_in_row=st.integers(0, 3),
)


@given(policies, st.lists(faults, min_size=40, max_size=60), st.booleans(), st.booleans())
def test_any_sequence_of_faults_ends_within_the_budgets(
    policy: Policy, coming: list[Fault], session: bool, formed: bool
) -> None:
    """Inner recoveries and restarts never exceed what the policy allows; then the job fails."""
    past: list[Past] = []
    for what in coming:
        newest = max([what.finished, *(seen.fault.finished for seen in past)])
        case = Case(fault=what, session=session, formed=formed, newest=newest, past=tuple(past))
        decision = decide(policy, case)
        assert decision.reason
        if decision.strategy is FAIL:
            break
        past.append(Past(fault=what, strategy=decision.strategy, newest=newest))
    else:
        pytest.fail("the faults never ended the job")
    chosen = [seen.strategy for seen in past]
    assert chosen.count(RESTART) <= policy.max_restarts
    inner = [strategy for strategy in chosen if strategy in INNER]
    assert len(inner) <= policy.max_recoveries
    assert set(inner) <= set(policy.strategies)
    assert not inner or (session and formed)


@given(policies, faults, st.lists(st.tuples(faults, st.sampled_from(INNER)), max_size=5))
def test_a_decision_depends_on_nothing_else(
    policy: Policy, what: Fault, past: list[tuple[Fault, Strategy]]
) -> None:
    """The same case is decided the same way: a coordinator that died decides no other."""
    assert judge(what, past, policy) == judge(what, past, policy)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"strategies": (RESTART,)}, "cannot be chosen"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"max_recoveries": -1}, "max_recoveries"),
        ({"max_in_row": -1}, "max_in_row"),
        ({"leave_timeout_s": 0.0}, "leave_timeout_s"),
        ({"join_timeout_s": -1.0}, "join_timeout_s"),
        ({"node_timeout_s": float("nan")}, "node_timeout_s"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(settings: dict[str, Any], word: str) -> None:
    """The error names the value that is wrong."""
    with pytest.raises(ValueError, match=word):
        Policy(**settings)


# ---- how exits become faults, and which fault is to blame


@pytest.mark.parametrize(
    ("exit_", "error", "kind", "words"),
    [
        (Exit(signal=9), None, Kind.PROCESS, "ended by signal 9 (SIGKILL)"),
        (Exit(signal=40), None, Kind.PROCESS, "ended by signal 40"),
        (Exit(code=3), None, Kind.USER_CODE, "ended with exit status 3"),
        (Exit(code=1), ErrorRecord(message="KeyError: 1"), Kind.USER_CODE, "raised KeyError: 1"),
        (Exit(signal=6), ErrorRecord(message="Abort: x"), Kind.USER_CODE, "raised Abort: x"),
    ],
)
def test_how_an_exit_is_judged(
    exit_: Exit, error: ErrorRecord | None, kind: Kind, words: str
) -> None:
    """A signal is a fault of the process; a status or an exception is the script's doing."""
    found = fault_of_exit(exit_, error, rank=2, node=1, finished=7, at=50.0)
    assert (found.kind, found.rank, found.finished, found.at) == (kind, 2, 7, 50.0)
    assert words in found.message
    assert found.blamed() == "rank 2 on node 1"


def test_the_time_of_an_exception_is_the_ranks_own() -> None:
    """Who failed first is told by when it raised, not by when its end was seen."""
    record = ErrorRecord(message="E", at=49.0)
    assert fault_of_exit(Exit(code=1), record, rank=0, node=0, finished=0, at=50.0).at == 49.0


@given(st.permutations([fault(kind) for kind in (Kind.USER_CODE, *RUNTIME, Kind.STORAGE)]))
def test_the_cause_is_found_in_any_order(seen: list[Fault]) -> None:
    """A broken link is never blamed while anything that breaks links is known."""
    assert root_cause(seen).kind is Kind.USER_CODE
    without = [one for one in seen if one.kind not in (Kind.USER_CODE, Kind.NODE_LOST)]
    assert root_cause(without).kind is Kind.DEVICE
