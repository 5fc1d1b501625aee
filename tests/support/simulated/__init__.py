"""Small simulated clusters: all times are round numbers, and only requested events occur."""

from __future__ import annotations

from typing import Any

import msgspec

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.simulation import costs
from rekindle.simulation.costs import Costs, JobRow, KindRow, StrategyRow
from rekindle.simulation.fault_mix import FaultRow, Mix, MixRow
from rekindle.simulation.job import Setting
from rekindle.simulation.outcome import World
from rekindle.simulation.progress import Cadence, Source
from rekindle.simulation.trace import Cause, Strike

# By strategy: its seconds here, where the state comes from, and whether the node moves.
TIMES = {
    Strategy.RETRY: (1.0, Source.LIVE, False),
    Strategy.RECOVER_IN_PLACE: (2.0, Source.LIVE, False),
    Strategy.RECOVER: (4.0, Source.LIVE, True),
    Strategy.SHRINK: (3.0, Source.LIVE, True),
    Strategy.HANG_RESTART: (50.0, Source.MEMORY, False),
    Strategy.RESTART: (50.0, Source.MEMORY, False),
    Strategy.RESCHEDULE_POD: (200.0, Source.MEMORY, True),
    Strategy.RESCHEDULE_JOB_ISOLATED: (500.0, Source.STORE, True),
    Strategy.RESCHEDULE_JOB: (500.0, Source.STORE, False),
    Strategy.DUMP: (3000.0, Source.MEMORY, True),
    Strategy.FAIL: (3000.0, Source.STORE, True),
}
REPAIR_S = 10_000.0
NEW_NODE_S = 30.0


def prices(detect_s: float = 0.0, **job: Any) -> Costs:
    """Return costs with the times above, independent of the number of devices."""
    strategies = {
        strategy: StrategyRow(
            strategy=strategy, devices=[1], seconds=[seconds], state=state, moves=moves
        )
        for strategy, (seconds, state, moves) in TIMES.items()
    }
    kinds = {
        kind: KindRow(kind=kind, detect_s=detect_s, repair_s=REPAIR_S)
        for kind in costs.load().kinds
    }
    settings = {"new_node_s": NEW_NODE_S, "overhead": 0.0, "grow_s": 3.0, "answer_s": 60.0} | job
    return Costs(strategies, kinds, JobRow(**settings))


def setting(policy: Policy, *, costs: Costs | None = None, **more: Any) -> Setting:
    """Return a setting, by default of four nodes with two devices that never write a checkpoint."""
    plan = {"step": 10.0, "checkpoint": 1e9, "stall": 0.0, "snapshot": 100.0, "overhead": 0.0}
    world = {"nodes": 4, "per_node": 2}
    for name, value in more.items():
        (plan if name in plan else world)[name] = value
    return Setting(policy, World(**world), costs or prices(), Cadence(**plan))


def strike(at: float, kind: FaultKind, *, cause: Cause = Cause.NOTHING, **more: Any) -> Strike:
    """Return a fault, by default on device 0 of node 1."""
    fields: dict[str, Any] = {"nodes": (1,), "device": 0, "seed": 0}
    row = {"name": kind.value, "weight": 1.0, "kind": kind}
    for name, value in more.items():
        (fields if name in Strike.__struct_fields__ else row)[name] = value
    return Strike(at=at, row=FaultRow(**row), cause=cause, **fields)


def plain_mix(rate: float, *kinds: FaultKind, **odds: Any) -> Mix:
    """Return a mix of equally frequent kinds, with `rate` faults a day for 1,000 devices.

    By default, it has no lemons, no groups of faults, and no second faults.
    """
    none = {"lemon_share": 0.0, "group_share": 0.0, "second_share": 0.0} | odds
    faults = tuple(FaultRow(name=kind.value, weight=1.0, kind=kind) for kind in kinds)
    return Mix("plain", MixRow(source="a test", per_1000_devices_per_day=rate, **none), faults)


def with_strategy(prices: Costs, strategy: Strategy, **changed: Any) -> Costs:
    """Return the same costs, with one strategy changed."""
    row = msgspec.structs.replace(prices.strategies[strategy], **changed)
    return Costs({**prices.strategies, strategy: row}, prices.kinds, prices.job)
