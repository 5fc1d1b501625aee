"""Make the decision: (policy, situation) -> strategy with its reason as text. Pure.

The function tries the strategies in the policy's order. Each strategy describes its action against
the fault, and its obstacles. The first strategy without an obstacle wins.
"""

from __future__ import annotations

import msgspec

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.history import Situation, same_errors
from rekindle.recovery.policy.policy import Policy, Strategy
from rekindle.recovery.policy.strategies import STRATEGIES


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a strategy and its reason, in one readable sentence.

    `isolate` means that new work must avoid the place of the fault. `roll_back` means that the
    restore skips the last restored state. `approval` means that a person must agree first. `apart`
    means that the decision uses the budget for faults of ranks that do not train together.
    """

    strategy: Strategy
    reason: str
    isolate: bool = False
    roll_back: bool = False
    approval: bool = False
    apart: bool = False


def decide(policy: Policy, situation: Situation) -> Decision:
    """Choose the first strategy of the policy's ladder that the state of the job allows."""
    chosen = _hopeless(situation) or _crash_loop(policy, situation) or _climb(policy, situation)
    if chosen.strategy is not Strategy.FAIL:
        return msgspec.structs.replace(chosen, approval=chosen.strategy in policy.approve)
    if situation.final_step is None or Strategy.DUMP not in policy.strategies:
        return chosen
    final = f"final checkpoint: the nodes write the snapshot of step {situation.final_step}"
    return Decision(strategy=Strategy.DUMP, reason=f"{chosen.reason}; {final}")


def _hopeless(situation: Situation) -> Decision | None:
    """Return the decision to fail if the job could never start."""
    if situation.fault.kind is FaultKind.LAUNCH:
        return Decision(strategy=Strategy.FAIL, reason=situation.fault.message)
    return None


def _crash_loop(policy: Policy, situation: Situation) -> Decision | None:
    """Decide about the same error twice after the same start; another restart alone cannot help."""
    fault = situation.fault
    # An exit status of a script with unknown steps is not enough evidence.
    known = situation.session or situation.newest > 0 or bool(fault.signature)
    if not (known and policy.progress_resets) or fault.kind is not FaultKind.USER_CODE:
        return None
    if same_errors(situation.past, fault, situation.resumed) < 2:
        return None
    begun = f"the state of step {situation.resumed}" if situation.resumed else "the beginning"
    cause = (
        f"{fault.message}, after step {fault.finished}; the same fault occurred after an earlier "
        f"start from {begun}"
    )
    rolled_back = any(past.rolled_back and past.fault.same_as(fault) for past in situation.past)
    if situation.older and not rolled_back and Strategy.RESTART in policy.strategies:
        option = STRATEGIES[Strategy.RESTART](policy, situation)
        if option is not None and not option.why_not:
            text = f"{cause}; the job skips the newest checkpoint; {option.doing}"
            return Decision(strategy=Strategy.RESTART, reason=text, roll_back=True)
    also = ", and also after a start from an older checkpoint" if rolled_back else ""
    text = f"{cause}{also}; the script is the likely cause"
    return Decision(strategy=Strategy.FAIL, reason=text)


def _climb(policy: Policy, situation: Situation) -> Decision:
    """Take the first available strategy, and state why the earlier ones are not available."""
    passed_over: list[str] = []
    for strategy in policy.ladder:
        option = STRATEGIES[strategy](policy, situation)
        if option is None:
            continue
        allowed = strategy in policy.strategies
        why_not = option.why_not if allowed else f"{strategy.value} is not allowed"
        if not why_not:
            reason = "; ".join((situation.fault.message, *passed_over, option.doing))
            return Decision(
                strategy=strategy, reason=reason, isolate=option.isolate, apart=option.apart
            )
        if why_not not in passed_over:
            passed_over.append(why_not)
    return Decision(
        strategy=Strategy.FAIL, reason="; ".join((situation.fault.message, *passed_over))
    )
