"""The decision: (fault, policy, case) -> strategy with its reason in words. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from rekindle.recovery.fault import Fault, Kind


class Strategy(str, enum.Enum):
    """Ways to recover, cheapest first (design section 2: the ladder)."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    SHRINK = "shrink"
    RESTART = "restart"
    DUMP = "dump"
    FAIL = "fail"


INNER = (Strategy.RETRY, Strategy.RECOVER_IN_PLACE, Strategy.RECOVER, Strategy.SHRINK)
ALLOWABLE = (*INNER, Strategy.DUMP)

_TIMEOUTS = (
    "leave_timeout_s",
    "join_timeout_s",
    "node_timeout_s",
    "coordinator_timeout_s",
    "dump_timeout_s",
)


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be done about faults, and how often.

    strategies: the inner strategies that may be used, and `dump`: whether a job that ends without
        success leaves last words; `restart` is bounded by `max_restarts` alone.
    max_restarts: restarts of all ranks in one job, as torchrun counts them.
    max_recoveries: inner recoveries in one job; a job that needs more is beyond repair.
    max_in_row: recoveries of one rank or node in a row without a finished step between them.
    leave_timeout_s: how long a healthy rank may take to leave its step before it is replaced; more
        than the longest stretch of a step without a collective.
    join_timeout_s: how long a started rank may take to reach its Session.
    node_timeout_s: how long the job waits for a node to take the place of a lost one.
    coordinator_timeout_s: how long ranks train on without a coordinator.
    dump_timeout_s: how long a node may take to write last words.
    """

    strategies: tuple[Strategy, ...] = ALLOWABLE
    max_restarts: int = 0
    max_recoveries: int = 128
    max_in_row: int = 3
    leave_timeout_s: float = 300.0
    join_timeout_s: float = 600.0
    node_timeout_s: float = 600.0
    coordinator_timeout_s: float = 600.0
    dump_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises ValueError: a strategy that cannot be chosen, or a negative limit.
        """
        for strategy in self.strategies:
            if strategy not in ALLOWABLE:
                allowed = ", ".join(s.value for s in ALLOWABLE)
                raise ValueError(f"policy: {strategy!r} cannot be chosen; choose of {allowed}")
        for name in ("max_restarts", "max_recoveries", "max_in_row"):
            if getattr(self, name) < 0:
                raise ValueError(f"policy: {name} is {getattr(self, name)}; 0 is the least")
        for name in _TIMEOUTS:
            if not getattr(self, name) > 0:
                raise ValueError(f"policy: {name} is {getattr(self, name)}; give seconds above 0")


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """One earlier fault of the job, what was chosen for it, and the newest step at that time."""

    fault: Fault
    strategy: Strategy
    newest: int = 0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision may look at.

    session: every rank of the broken generation trains through a Session.
    formed: a generation of this job has been formed since the last restart.
    newest: most steps finished by any rank of the job.
    spares: agents in reserve. left: nodes that the world may go on with, without those that are
        lost; 0: it may not.
    last_words: step of the newest snapshot, if no checkpoint is as new.
    past: earlier faults and their strategies, oldest first.
    """

    fault: Fault
    session: bool
    formed: bool
    newest: int
    spares: int = 0
    left: int = 0
    last_words: int | None = None
    past: tuple[Past, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy and why it was chosen, in one readable sentence."""

    strategy: Strategy
    reason: str


Rule = Callable[[Policy, Case], "Decision | None"]


def decide(policy: Policy, case: Case) -> Decision:
    """Choose the cheapest strategy that policy, history and the state of the job allow."""
    decisions = (rule(policy, case) for rule in _RULES)
    chosen = next(decision for decision in decisions if decision is not None)
    if chosen.strategy is not Strategy.FAIL or case.last_words is None:
        return chosen
    if Strategy.DUMP not in policy.strategies:
        return chosen
    text = f"{chosen.reason}; last words: the snapshot of step {case.last_words} is to be written"
    return Decision(strategy=Strategy.DUMP, reason=text)


def _same_again(policy: Policy, case: Case) -> Decision | None:
    """A restart met the same error of the same rank at the same step: another cannot help."""
    fault = case.fault
    if fault.kind is not Kind.USER_CODE:
        return None
    for past in case.past:
        seen = past.fault
        if (seen.rank, seen.finished, seen.signature) == (
            fault.rank,
            fault.finished,
            fault.signature,
        ) and past.strategy is Strategy.RESTART:
            return _fail(
                f"{fault.message}, again after step {fault.finished} as before the restart; "
                "the script is the likely cause"
            )
    return None


def _never_started(policy: Policy, case: Case) -> Decision | None:
    if case.fault.kind is Kind.LAUNCH:
        return _fail(case.fault.message)
    return None


def _user_code(policy: Policy, case: Case) -> Decision | None:
    if case.fault.kind is Kind.USER_CODE:
        return _restart(policy, case)
    return None


def _inner(policy: Policy, case: Case) -> Decision | None:
    """Keep the healthy ranks alive, if they can wait for the broken one."""
    if _out_of_reach(policy, case):
        return None
    passed_over: list[str] = []
    for strategy, doing in _options(case):
        why_not = _why_not(strategy, policy, case)
        if not why_not:
            said = [case.fault.message, *passed_over, doing]
            return Decision(strategy=strategy, reason="; ".join(said))
        passed_over.append(why_not)
    return None


def _options(case: Case) -> tuple[tuple[Strategy, str], ...]:
    """Return what can help against such a fault, the cheapest first, and what it means."""
    if case.fault.kind is not Kind.NODE_LOST:
        return _INNER_FOR[case.fault.kind]
    spare = (Strategy.RECOVER, "a spare takes its place, all healthy ranks wait")
    fewer = (Strategy.SHRINK, f"the world goes on with {case.left} nodes until one comes")
    wait = (
        Strategy.RECOVER,
        "there is no spare: a new node takes its place, all healthy ranks wait",
    )
    if case.spares:
        return (spare, fewer) if case.left else (spare,)
    return (fewer, wait) if case.left else (wait,)


def _out_of_reach(policy: Policy, case: Case) -> str:
    """Say why no inner strategy can be used at all; empty: one can."""
    if not case.session:
        return "without a Session no rank can wait for another"
    if not case.formed:
        return "the ranks have not met yet"
    used = sum(past.strategy in INNER for past in case.past)
    if used >= policy.max_recoveries:
        return f"{used} of {policy.max_recoveries} recoveries are used"
    in_row = len(_in_row(case))
    if in_row >= policy.max_in_row:
        return f"{case.fault.blamed()} was recovered {in_row} times without a step between"
    return ""


def _why_not(strategy: Strategy, policy: Policy, case: Case) -> str:
    """Say why this inner strategy is passed over; empty: it is not."""
    if strategy not in policy.strategies:
        return f"{strategy.value} is not allowed"
    options = [option for option, _ in _options(case) if option in policy.strategies]
    # A repair that did not last is not tried again while there is something stronger.
    if strategy is Strategy.RETRY and strategy in _in_row(case) and len(options) > 1:
        return f"{strategy.value} did not last"
    return ""


def _all_anew(policy: Policy, case: Case) -> Decision | None:
    options = (option for option, _ in _options(case))
    each = "; ".join(_why_not(option, policy, case) for option in options)
    return _restart(policy, case, _out_of_reach(policy, case) or each)


_RULES: tuple[Rule, ...] = (_never_started, _same_again, _user_code, _inner, _all_anew)

_ANEW = (Strategy.RECOVER_IN_PLACE, "the rank is started anew on its node, all others wait")
_AGAIN = (Strategy.RETRY, "all ranks are regrouped and do the step again")

# For each kind (but lost nodes) what can help, the cheapest first.
_INNER_FOR = {
    Kind.TRANSIENT: (_AGAIN, _ANEW),
    Kind.DEVICE_MEMORY: (
        (Strategy.RETRY, "its device is repaired, every process stays"),
        _ANEW,
    ),
    Kind.DEVICE: (_ANEW,),
    Kind.PROCESS: (_ANEW,),
    Kind.STUCK: (_ANEW,),
    Kind.RESTORE: ((Strategy.RETRY, "the next source of its state is tried"),),
    Kind.COORDINATOR: ((Strategy.RETRY, "all ranks are regrouped with the state they have"),),
    Kind.LINK: (_AGAIN,),
}


def _in_row(case: Case) -> list[Strategy]:
    """Inner recoveries of the same place, latest first, with no finished step between.

    That another source of a rank's state had failed is none: there are only so many.
    """
    found = []
    for past in reversed(case.past):
        if past.strategy not in INNER or past.newest < case.newest:
            break
        restore = Kind.RESTORE in (past.fault.kind, case.fault.kind)
        if restore and past.fault.signature != case.fault.signature:
            continue
        if (past.fault.rank, past.fault.node) == (case.fault.rank, case.fault.node):
            found.append(past.strategy)
    return found


def _restart(policy: Policy, case: Case, why: str = "") -> Decision:
    """Start all ranks anew; why: nothing cheaper can be done."""
    said = f"{case.fault.message}; {why}" if why else case.fault.message
    used = sum(past.strategy is Strategy.RESTART for past in case.past)
    if used >= policy.max_restarts:
        return _fail(f"{said}; {used} of {policy.max_restarts} restarts are used")
    text = f"all ranks are started anew (restart {used + 1} of {policy.max_restarts})"
    return Decision(strategy=Strategy.RESTART, reason=f"{said}; {text}")


def _fail(reason: str) -> Decision:
    return Decision(strategy=Strategy.FAIL, reason=reason)
