"""Keep the part of a job's past that can still change a decision.

`decide` folds over the whole past. This suits a job, but it is too slow for simulated years. This
module drops old decisions and subtracts their use from the budgets of the policy. Every decision
stays the same, except for the numbers in its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from rekindle.recovery.policy import history
from rekindle.recovery.policy.decide import Decision, decide
from rekindle.recovery.policy.history import Past, Situation
from rekindle.recovery.policy.policy import INNER, JOBS, Policy, Strategy

_PODS = (Strategy.RESCHEDULE_POD,)
# from history: counts how much of a budget the decisions used
_Fold = Callable[[Iterable[Past]], int]

# recovery.policy.strategies defines what uses up each budget.
_BUDGETS: dict[str, _Fold] = {
    "max_recoveries": history.recoveries_used,
    "max_restarts": history.restarts_used,
    "max_reschedules": lambda past: history.used(past, JOBS),
    "max_pod_reschedules": lambda past: history.used(past, _PODS),
}


class RecoveryBudgets:
    """Hold a policy and its past decisions in one job.

    many: `forget` drops nothing while there are fewer decisions, because one large pass costs less.
    """

    def __init__(self, policy: Policy, many: int = 16) -> None:
        self._whole = policy
        self._many = many
        self.policy = policy
        self.past: list[Past] = []

    def begin_anew(self) -> None:
        """Reset budgets and past, because a person has started a new job."""
        self.policy, self.past = self._whole, []

    def decide(self, situation: Situation) -> Decision:
        """Decide about a case with this past, and store the decision."""
        decision = decide(self.policy, situation)
        self.past.append(
            Past(
                fault=situation.fault,
                strategy=decision.strategy,
                newest=situation.newest,
                incident=situation.incident,
                resumed=situation.resumed,
                rolled_back=decision.roll_back,
            )
        )
        return decision

    def forget(self, *, now: float, newest: int, oldest: int) -> None:
        """Drop decisions that cannot affect a fault after `now`, in a later incident.

        newest: see `Situation`; it never decreases. oldest: every later fault has finished at least
        this number of steps.
        """
        if len(self.past) < self._many:
            return
        row = self._row()
        # Always keep one of these: decisions about restarts also depend on whether one exists.
        pods = max(self.policy.max_pod_reschedules - 1, 0)
        kept, old = list[Past](), list[Past]()
        for number, each in enumerate(self.past):
            recent = each.fault.code and now - each.fault.at <= history.SAME_CODE_WINDOW_S
            repeatable = each.strategy not in INNER and each.fault.finished >= oldest
            pod = history.used([each], _PODS)
            if each.newest >= newest or recent or repeatable or number in row or pod > pods:
                kept.append(each)
            else:
                old.append(each)
                pods -= pod
        self.past = kept
        self._settle(old)

    def _row(self) -> set[int]:
        """Return the indexes of decisions in a sequence that progress does not end (ModelArts)."""
        if self.policy.progress_resets:
            return set()
        last = max((n for n, each in enumerate(self.past) if each.fault.of_hardware), default=-1)
        late = range(last + 1, len(self.past))
        return {last} | {n for n in late if self.past[n].strategy not in INNER}

    def _settle(self, old: list[Past]) -> None:
        """Subtract the use by these decisions from the budgets."""
        rest = {name: getattr(self.policy, name) - fold(old) for name, fold in _BUDGETS.items()}
        least = {name: max(left, 0) for name, left in rest.items()}
        self.policy = msgspec.structs.replace(self.policy, **least)
