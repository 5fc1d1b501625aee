"""What may be done about faults, in which order, how often, and who is asked first. Pure values."""

from __future__ import annotations

import enum
import math

import msgspec


class Strategy(str, enum.Enum):
    """Ways to recover, cheapest first (design section 2: the ladder)."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    SHRINK = "shrink"
    HANG_RESTART = "hang-restart"
    RESTART = "restart"
    RESCHEDULE_POD = "reschedule-pod"
    RESCHEDULE_JOB_ISOLATED = "reschedule-job-isolated"
    RESCHEDULE_JOB = "reschedule-job"
    DUMP = "dump"
    FAIL = "fail"


class Stragglers(str, enum.Enum):
    """What follows when a node has become slow while it trains; no more than saying so: `warn`."""

    WARN = "warn"
    ISOLATE = "isolate"  # it is checked when all ranks wait anyway
    REPLACE = "replace"  # training is held between two steps for that


INNER = (Strategy.RETRY, Strategy.RECOVER_IN_PLACE, Strategy.RECOVER, Strategy.SHRINK)
ANEW = (Strategy.HANG_RESTART, Strategy.RESTART)
OUTER = (
    Strategy.RESCHEDULE_POD,
    Strategy.RESCHEDULE_JOB_ISOLATED,
    Strategy.RESCHEDULE_JOB,
)
LADDER = (*INNER, *ANEW, *OUTER)
ALLOWABLE = (*LADDER, Strategy.DUMP)

# Agents that have not come by then are asked for: their launcher may have died before it had
# started them. Where that may be, the job begins without them.
LATE_S = 20.0

_COUNTS = (
    "max_restarts",
    "max_recoveries",
    "max_in_row",
    "max_reschedules",
    "max_pod_reschedules",
    "max_hangs_in_row",
    "max_reschedules_in_row",
)
_TIMEOUTS = (
    "leave_timeout_s",
    "join_timeout_s",
    "node_timeout_s",
    "coordinator_timeout_s",
    "dump_timeout_s",
    "approval_timeout_s",
    "hang_timeout_s",
    "idle_timeout_s",
)


MOST = 2**31 - 1  # of whatever is counted; what has no limit has this one


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be done about faults, and how often.

    strategies: what may be used, in the order in which it is tried; `dump`, wherever it stands:
        whether a job that ends without success leaves last words.
    max_restarts: restarts of all ranks in one job, as torchrun counts them, without those that heal
        a device or end a hang.
    max_recoveries: inner recoveries in one job, and restarts that heal or end a hang; a job that
        needs more is beyond repair.
    max_in_row: recoveries of one rank or node in a row without a finished step between them; after
        hangs, of any.
    max_reschedules: how often the whole job may be placed anew (ModelArts: job-retry-num).
    max_pod_reschedules: how often one node's pod may be (ModelArts: pod-retry-num).
    unconditional: `reschedule-job` may answer what is no fault of a node or device, too.
    max_reschedules_in_row: such answers in a row; after that the script is taken for the cause.
    max_hangs_in_row: restarts in a row because of a hang.
    progress_resets: steps count: one that was not done before ends such a row, as a fault of a node
        or device does, and the same error at the same step twice is the script's. ModelArts knows
        of no steps.
    approve: strategies that wait for a person's approval.
    leave_timeout_s: how long a healthy rank may take to leave its step before it is replaced; more
        than the longest stretch of a step without a collective.
    join_timeout_s: how long a started rank may take to reach its Session.
    node_timeout_s: how long the job waits for a node to take the place of a lost one.
    coordinator_timeout_s: how long ranks train on without a coordinator.
    dump_timeout_s: how long a node may take to write last words.
    approval_timeout_s: how long the job waits for the person.
    hang_timeout_s: how long a rank may make no progress in a step before the job is looked at as
        hanging, even if all steps so far were short; see rekindle.agent.hang_limits.
    idle_timeout_s: how long all processes of a script without a Session may do nothing.
    stragglers: what follows when light profiling shows that a node has become slow. Whatever it is,
        a node check has to find it sick first.
    stragglers_shadow: it is only said what would follow.
    """

    strategies: tuple[Strategy, ...] = ALLOWABLE
    max_restarts: int = 0
    max_recoveries: int = 128
    max_in_row: int = 3
    max_reschedules: int = 0
    max_pod_reschedules: int = 0
    unconditional: bool = True
    max_reschedules_in_row: int = 3
    max_hangs_in_row: int = 3
    progress_resets: bool = True
    approve: tuple[Strategy, ...] = ()
    leave_timeout_s: float = 300.0
    join_timeout_s: float = 600.0
    node_timeout_s: float = 600.0
    coordinator_timeout_s: float = 600.0
    dump_timeout_s: float = 600.0
    approval_timeout_s: float = 86_400.0
    hang_timeout_s: float = 10.0
    idle_timeout_s: float = 1800.0
    stragglers: Stragglers = Stragglers.WARN
    stragglers_shadow: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises ValueError: a strategy that cannot be chosen or is named twice, or a negative limit.
        """
        for name, choice in (("strategies", ALLOWABLE), ("approve", LADDER)):
            _check_strategies(name, getattr(self, name), choice)
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise ValueError(f"policy: {name} is {getattr(self, name)}; 0 is the least")
            if getattr(self, name) > MOST:
                raise ValueError(f"policy: {name} is far too much; {MOST} is the most")
        for name in _TIMEOUTS:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"policy: {name} is {getattr(self, name)}; give seconds above 0")

    @property
    def ladder(self) -> tuple[Strategy, ...]:
        """Every way to recover in this policy's order; what it does not name keeps its place."""
        named = iter(s for s in self.strategies if s is not Strategy.DUMP)
        return tuple(next(named) if s in self.strategies else s for s in LADDER)


def _check_strategies(name: str, given: tuple[Strategy, ...], choice: tuple[Strategy, ...]) -> None:
    for index, strategy in enumerate(given):
        if strategy not in choice:
            allowed = ", ".join(s.value for s in choice)
            raise ValueError(f"policy: {strategy!r} cannot be chosen; choose of {allowed}")
        if strategy in given[:index]:
            raise ValueError(f"policy: {name} names {strategy.value} twice")
