"""Decisions for any history: within the budgets, finite, and repeatable."""

from __future__ import annotations

import msgspec
from decisions import fault, judge
from hypothesis import given
from hypothesis import strategies as st

from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.history import Past, Situation, counts, recoveries_used, reset_helps
from rekindle.recovery.policy.policy import ALLOWABLE, INNER, OUTER, Policy, Strategy

IN_PLACE = Strategy.RECOVER_IN_PLACE
HANG_RESTART, RESTART, FAIL = Strategy.HANG_RESTART, Strategy.RESTART, Strategy.FAIL
POD, ISOLATED = Strategy.RESCHEDULE_POD, Strategy.RESCHEDULE_JOB_ISOLATED
JOB = Strategy.RESCHEDULE_JOB


def _device(
    kind: FaultKind, device: int, code: str, user: bool, reset_helps: bool, at: float
) -> Fault:
    return Fault(
        kind=kind, message="a device broke", rank=device, node=0, host="h", device=device,
        code=code, user_caused=user, reset_helps=reset_helps, at=at,
    )  # fmt: skip


ranks = st.builds(
    fault,
    kind=st.sampled_from(
        [kind for kind in FaultKind if kind not in (FaultKind.STORAGE, FaultKind.STRAGGLER)]
    ),
    rank=st.integers(0, 3),
    finished=st.integers(0, 6),
    signature=st.sampled_from("EFG"),
)
devices = st.builds(
    _device,
    kind=st.sampled_from([FaultKind.DEVICE, FaultKind.DEVICE_MEMORY]),
    device=st.integers(0, 1),
    code=st.sampled_from(["", "A", "B"]),
    user=st.booleans(),
    reset_helps=st.booleans(),
    at=st.floats(0, 200_000),
)
faults = st.one_of(ranks, devices)
policies = st.builds(
    Policy,
    strategies=st.lists(st.sampled_from(ALLOWABLE), unique=True).map(tuple),
    max_restarts=st.integers(0, 4),
    max_recoveries=st.integers(0, 8),
    max_in_row=st.integers(0, 3),
    max_reschedules=st.integers(0, 4),
    max_pod_reschedules=st.integers(0, 4),
    unconditional=st.booleans(),
    progress_resets=st.booleans(),
)
engines = st.lists(st.sampled_from(OUTER), unique=True).map(tuple)


@given(
    policies,
    engines,
    st.lists(faults, min_size=60, max_size=80),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_sequence_of_faults_ends_within_the_budgets(
    policy: Policy,
    engine: tuple[Strategy, ...],
    coming: list[Fault],
    session: bool,
    formed: bool,
    older: bool,
) -> None:
    """Any sequence of faults stays within the budgets, and only allowed strategies are used."""
    past: list[Past] = []
    for number, what in enumerate(what for what in coming if counts(what)):
        newest = max([what.finished, *(seen.fault.finished for seen in past)])
        situation = Situation(
            fault=what, session=session, formed=formed, newest=newest, engine=engine,
            incident=number // 2, older=older, past=tuple(past),
        )  # fmt: skip
        decision = decide(policy, situation)
        assert decision.reason
        assert not (decision.isolate and (what.user_caused or what.kind is FaultKind.EVICTION))
        if decision.strategy is FAIL:
            break
        past.append(
            Past(
                fault=what, strategy=decision.strategy, newest=newest, incident=number // 2,
                rolled_back=decision.roll_back,
            )
        )  # fmt: skip
    assert len(past) <= 8 + 4 + 4 + 4
    chosen = [seen.strategy for seen in past]
    assert set(chosen) <= set(policy.strategies)
    assert set(chosen) & set(OUTER) <= set(engine)
    reset = [seen for seen in past if seen.strategy is RESTART and reset_helps(seen.fault)]
    assert chosen.count(RESTART) - len(reset) <= policy.max_restarts
    assert recoveries_used(past) <= policy.max_recoveries
    assert chosen.count(POD) <= policy.max_pod_reschedules
    assert chosen.count(JOB) + chosen.count(ISOLATED) <= policy.max_reschedules
    assert not set(chosen) & set(INNER) or (session and formed)


@given(
    st.integers(0, 4),
    st.integers(0, 4),
    st.booleans(),
    st.lists(st.integers(-1, 7), min_size=12, max_size=12),
    st.integers(0, 2),
)
def test_hangs_without_progress_have_an_end(
    in_row: int, hangs_in_row: int, resets: bool, ranks: list[int], spares: int
) -> None:
    """Hangs without progress fail the job within the limits, whichever ranks are the cause."""
    policy = Policy(max_in_row=in_row, max_hangs_in_row=hangs_in_row, progress_resets=resets)
    past: list[Past] = []
    for number, rank in enumerate(ranks):
        what = msgspec.structs.replace(fault(FaultKind.HANG, rank), at=1000.0 + number)
        situation = Situation(
            fault=what, session=True, formed=True, newest=5, spares=spares, past=tuple(past)
        )
        decision = decide(policy, situation)
        past.append(Past(fault=what, strategy=decision.strategy, newest=5))
        if decision.strategy is FAIL:
            break
    chosen = [seen.strategy for seen in past]
    assert chosen[-1] is FAIL
    assert len(chosen) <= in_row + hangs_in_row + 1
    assert chosen.count(HANG_RESTART) == hangs_in_row


@given(policies, st.lists(ranks, max_size=12), st.integers(0, 6))
def test_evictions_use_up_no_budget(policy: Policy, before: list[Fault], newest: int) -> None:
    """Evictions in the history do not change a later decision."""
    evicted = Past(fault=fault(FaultKind.EVICTION, rank=3), strategy=JOB, newest=0)
    past = [Past(fault=seen, strategy=IN_PLACE, newest=0) for seen in before]
    what = fault(FaultKind.USER_CODE, rank=2, finished=newest, signature="H")
    with_, without = (
        decide(
            policy, Situation(fault=what, session=True, formed=True, newest=newest, past=tuple(p))
        )
        for p in ([*past, evicted, evicted], past)
    )
    assert with_.strategy is without.strategy


@given(policies, faults, st.lists(st.tuples(faults, st.sampled_from(INNER)), max_size=5))
def test_a_decision_depends_on_nothing_else(
    policy: Policy, what: Fault, past: list[tuple[Fault, Strategy]]
) -> None:
    """The same situation gives the same decision, also in a coordinator that takes over."""
    assert judge(what, past, policy) == judge(what, past, policy)
