"""The simulation drops parts of a job's past, and decisions do not change."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.faults.fault import FaultKind as Kind
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import ALLOWABLE, Policy
from rekindle.simulation.memory import RecoveryBudgets

KINDS = (
    Kind.PROCESS, Kind.USER_CODE, Kind.LINK, Kind.DEVICE_MEMORY, Kind.DEVICE, Kind.NODE_LOST,
    Kind.NODE, Kind.HANG, Kind.EVICTION, Kind.SCHEDULING, Kind.TRANSIENT,
)  # fmt: skip

policies = st.builds(
    Policy,
    strategies=st.permutations(ALLOWABLE).flatmap(
        lambda order: st.integers(4, len(order)).map(lambda many: tuple(order[:many]))
    ),
    max_restarts=st.integers(0, 5),
    max_recoveries=st.integers(0, 12),
    max_in_row=st.integers(1, 3),
    max_reschedules=st.integers(0, 5),
    max_pod_reschedules=st.integers(0, 4),
    max_reschedules_in_row=st.integers(1, 3),
    max_hangs_in_row=st.integers(1, 3),
    unconditional=st.booleans(),
    progress_resets=st.booleans(),
)
# One fault: kind, rank, code, self-reset, hours and steps since the last fault, same incident.
faults = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 2),
    st.sampled_from(["", "A", "B"]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 5.0, 13.0, 30.0]),
    st.sampled_from([0, 0, 1, 50]),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(policy=policies, story=st.lists(faults, min_size=5, max_size=40), spares=st.integers(0, 1))
def test_no_decision_changes(policy: Policy, story: list[Any], spares: int) -> None:
    """For any faults and policy, each decision is the decision with the complete past.

    Only the reason may differ.
    """
    memory, whole = RecoveryBudgets(policy, many=0), list[Past]()
    now, newest, resumed, incident = 0.0, 0, 0, 0
    for kind, rank, code, reset_helps, hours, steps, same in story:
        now += hours * 3600
        newest += steps
        if not same:
            incident += 1
            memory.forget(now=now, newest=newest, oldest=max(newest - 60, 0))
        fault = Fault(
            kind=kind, message="m", rank=rank, node=rank, finished=newest, signature="s",
            at=now, host=str(rank), device=0, code=code, reset_helps=reset_helps,
        )  # fmt: skip
        case = Situation(
            fault=fault, session=True, formed=True, newest=newest, resumed=resumed,
            older=True, spares=spares, incident=incident, past=tuple(whole),
        )  # fmt: skip
        expected = decide(policy, case)
        short = msgspec.structs.replace(case, past=tuple(memory.past))
        assert nameless(memory.decide(short)) == nameless(expected)
        whole.append(
            Past(
                fault=fault,
                strategy=expected.strategy,
                newest=newest,
                incident=incident,
                resumed=resumed,
                rolled_back=expected.roll_back,
            )
        )
        resumed = max(newest - 10, 0)


def test_a_long_past_stays_short() -> None:
    """RecoveryBudgets keeps few of 1,000 faults, and the budget ends at the correct fault."""
    memory = RecoveryBudgets(Policy(max_recoveries=1000, max_restarts=0))
    chosen = []
    for number in range(1002):
        fault = Fault(kind=Kind.PROCESS, message="m", rank=1, node=1, finished=number)
        case = Situation(
            fault=fault,
            session=True,
            formed=True,
            newest=number,
            incident=number,
            past=tuple(memory.past),
        )
        chosen.append(memory.decide(case).strategy.value)
        memory.forget(now=float(number), newest=number + 1, oldest=number)
        assert len(memory.past) <= 16
    assert set(chosen[:1000]) == {"recover-in-place"}
    assert set(chosen[1000:]) == {"fail"}


def nameless(decision: Decision) -> Decision:
    """Return the decision without its reason, which has the rest of a budget."""
    return msgspec.structs.replace(decision, reason="")
