"""Decisions for the levels of chip faults that ModelArts names.

The levels are "notice", "minor", "major" and "critical". MindCluster's levels in the tables are
finer.
"""

from __future__ import annotations

import pytest

from rekindle.recovery.faults.classification import EventSource, HealthEvent, fault_of_event
from rekindle.recovery.faults.tables.tables import Tables
from rekindle.recovery.faults.tables.verdict import Urgency
from rekindle.recovery.policy import annotations as a
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.history import Situation
from rekindle.recovery.policy.policy import Policy, Strategy

AUTO = a.from_modelarts({a.JOB_RETRY_NUM: "8"}, Policy(strategies=()))
TABLES = Tables.load()


@pytest.mark.parametrize(
    ("code", "level"), [("80A18006", "NotHandleFault"), ("80DE0207", "SubHealthFault")]
)
def test_a_notice_asks_for_nothing(code: str, level: str) -> None:
    """A fault of level notice causes no decision, and training continues."""
    verdict = TABLES.ascend(code)
    assert (verdict.level, verdict.urgency is Urgency.NOW) == (level, False)


@pytest.mark.parametrize(
    ("code", "level", "strategy"),
    [
        ("80C98009", "RestartRequest", Strategy.RESTART),
        ("80E01801", "RestartBusiness", Strategy.RESTART),
        ("8C0A4E00", "FreeRestartNPU", Strategy.RESTART),
        ("80E18005", "RestartNPU", Strategy.RESTART),
        ("80E18402", "SeparateNPU", Strategy.RESCHEDULE_JOB_ISOLATED),
    ],
)
def test_minor_and_major_faults_reset_and_critical_ones_cannot(
    code: str, level: str, strategy: Strategy
) -> None:
    """A device that a reset repairs restarts in its containers. Another device is isolated."""
    verdict = TABLES.ascend(code)
    assert (verdict.level, verdict.urgency) == (level, Urgency.NOW)
    event = HealthEvent(source=EventSource.ASCEND, what=code, node=0, device=0)
    fault = fault_of_event(event, verdict, rank=0, finished=5, at=1.0)
    situation = Situation(fault=fault, session=False, formed=True, newest=5)
    assert decide(AUTO, situation).strategy is strategy
