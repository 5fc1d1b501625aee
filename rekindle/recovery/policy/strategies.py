"""Define each strategy of the ladder: its action against a fault, and its obstacles. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rekindle.recovery.faults.fault import SICK, FaultKind
from rekindle.recovery.policy import history
from rekindle.recovery.policy.history import Situation
from rekindle.recovery.policy.policy import INNER, JOBS, RESTARTS_APART, Policy, Replicas, Strategy

# Returns None if the strategy does not help against this fault.
StrategyFunction = Callable[[Policy, Situation], "Option | None"]

_AGAIN = "all ranks regroup and repeat the step"
_RETRY = {
    FaultKind.TRANSIENT: _AGAIN,
    FaultKind.LINK: _AGAIN,
    FaultKind.DEVICE_MEMORY: "the rank repairs its device, and all processes continue",
    FaultKind.RESTORE: "the rank tries the next source of its state",
    FaultKind.COORDINATOR: "all ranks regroup with their current state",
}
_IN_PLACE = (
    FaultKind.TRANSIENT,
    FaultKind.DEVICE_MEMORY,
    FaultKind.DEVICE,
    FaultKind.PROCESS,
    FaultKind.STUCK,
    FaultKind.HANG,
    FaultKind.HOST_OOM,
    FaultKind.DEVICE_OOM,
    FaultKind.UNKNOWN,
)
_HEALING = ("its device may heal when no process uses it", "the agent resets its device")
_NOT_FORMED = "the ranks have not formed a generation yet"
STARTS_NO_PROCESS = (Strategy.RETRY,)  # these do not help against the end of a rank
_MOVES = (Strategy.RECOVER, Strategy.SHRINK)
_STAYS = tuple(strategy for strategy in INNER if strategy not in _MOVES)
_GONE = (FaultKind.NODE_LOST, FaultKind.EVICTION)  # the node does not exist any longer
# A process or a node is lost, and the script is not known to be the cause. A process without memory
# is not among them, because its next one would need as much.
_LOSSES = (
    FaultKind.PROCESS,
    FaultKind.STUCK,
    FaultKind.HANG,
    FaultKind.DEVICE,
    FaultKind.DEVICE_MEMORY,
    FaultKind.NODE_LOST,
    FaultKind.NODE,
    FaultKind.EVICTION,
)
_NEEDS_NO_START = (
    FaultKind.HANG,
    FaultKind.NODE,
    FaultKind.STRAGGLER,
    FaultKind.EVICTION,
    FaultKind.SCHEDULING,
)


class Option(msgspec.Struct, frozen=True):
    """Describe the action of a strategy as text, and the obstacle, if any.

    `isolate` means that the strategy isolates the place of the fault. `apart` means that the
    strategy uses the budget for faults of ranks that do not train together.
    """

    doing: str
    why_not: str = ""
    isolate: bool = False
    apart: bool = False


def _retry(policy: Policy, situation: Situation) -> Option | None:
    if situation.dead:
        return None
    if situation.fault.kind is FaultKind.REPLICAS:
        return _return_to_equal_state(policy, situation)
    doing = _RETRY.get(situation.fault.kind)
    return Option(doing, _hinders_inner(Strategy.RETRY, policy, situation)) if doing else None


def _return_to_equal_state(policy: Policy, situation: Situation) -> Option:
    """Return to a state from before ranks differed, once for the same tensors."""
    again = any(
        past.strategy is Strategy.RETRY
        and past.fault.kind is FaultKind.REPLICAS
        and past.fault.signature == situation.fault.signature
        for past in situation.past
    )
    if policy.replicas is Replicas.FAIL:
        why_not = "the policy's replicas is fail"
    elif not situation.common:
        why_not = "no snapshot or checkpoint is from before that"
    elif again:
        why_not = "the same tensors differ again after a return to an older state"
    else:
        why_not = _hinders_inner(Strategy.RETRY, policy, situation)
    return Option(f"all ranks return to the state of step {situation.common}", why_not)


def _recover_in_place(policy: Policy, situation: Situation) -> Option | None:
    fault = situation.fault
    if not _is_bound_to_a_rank(situation):
        return None
    doing = "the agent restarts the rank on its node, and all other ranks wait"
    if history.reset_helps(fault):
        doing = f"{_HEALING[history.resets(fault)]}; {doing}"
    return Option(doing, _hinders_inner(Strategy.RECOVER_IN_PLACE, policy, situation))


def _recover(policy: Policy, situation: Situation) -> Option | None:
    if not _leaves_its_place(situation) and not _is_bound_to_a_rank(situation):
        return None
    if situation.spares:
        doing = "a spare replaces it, and all healthy ranks wait"
    elif situation.left and _leaves_its_place(situation) and Strategy.SHRINK in policy.strategies:
        return Option(
            "", _hinders_inner(Strategy.RECOVER, policy, situation) or "there is no spare"
        )
    else:
        doing = "there is no spare, so a new node replaces it, and all healthy ranks wait"
    why_not = _hinders_inner(Strategy.RECOVER, policy, situation) or _stays(situation)
    why_not = why_not or _comes_back(policy, situation) or _loses_state(situation)
    return Option(doing, why_not, _is_sick(situation))


def _loses_state(situation: Situation) -> str:
    """Return what the end of a healthy node's agent would lose, or an empty text."""
    lost = situation.final_step if situation.alone and not _leaves_its_place(situation) else None
    return f"the snapshot of step {lost} is only in the memory of its node" if lost else ""


def _shrink(policy: Policy, situation: Situation) -> Option | None:
    if not _leaves_its_place(situation) or not situation.left:
        return None
    doing = f"the world continues with {situation.left} nodes until a new node joins"
    return Option(doing, _hinders_inner(Strategy.SHRINK, policy, situation), _is_sick(situation))


def _hang_restart(policy: Policy, situation: Situation) -> Option | None:
    if situation.fault.kind is not FaultKind.HANG:
        return None
    row = _in_row(policy, situation, Strategy.HANG_RESTART)
    doing = "the agents restart all processes on their nodes"
    if row >= policy.max_hangs_in_row:
        return Option(doing, f"it hung {row} consecutive times")
    return Option(doing, _spent(policy, situation))


def _in_row(policy: Policy, situation: Situation, strategy: Strategy) -> int:
    """Return how often the strategy was chosen for this problem, with no other event between."""
    return history.in_row(
        situation.past,
        strategy,
        situation.fault,
        newest=situation.newest,
        progress_resets=policy.progress_resets,
    )


def _restart(policy: Policy, situation: Situation) -> Option | None:
    fault = situation.fault
    apart = _is_lost_apart(situation)
    if fault.kind is FaultKind.REPLICAS or (fault.kind in _NEEDS_NO_START and not apart):
        return None
    if fault.kind is FaultKind.HANG and Strategy.HANG_RESTART in policy.strategies:
        return None  # it does the same, with a limit of its own
    pods = policy.max_pod_reschedules and Strategy.RESCHEDULE_POD in policy.strategies
    if fault.kind is FaultKind.NODE_LOST and pods:
        return None  # the platform places its pod again
    if history.reset_helps(fault):
        why_not = situation.worn_out or _spent(policy, situation)
        doing = f"{_HEALING[history.resets(fault)]}, and the job restarts all ranks"
        return Option(doing, why_not)
    if fault.kind is FaultKind.SOURCE:
        again = _in_row(policy, situation, Strategy.RESTART)
        why_not = "the texts differ also after a restart of all ranks" if again else ""
        doing = "the job restarts all ranks with the present text"
        return Option(doing, why_not or _spent(policy, situation))
    if fault.reset_failed or _is_beyond_reset(situation):
        return None
    used = history.restarts_apart(situation.past, situation.newest)
    if apart and used < RESTARTS_APART:
        doing = (
            "the job restarts all ranks, because they do not train together "
            f"(restart {used + 1} of {RESTARTS_APART} for this reason)"
        )
        return Option(doing, situation.worn_out, _is_sick(situation), apart=True)
    used = history.restarts_used(situation.past)
    if used >= policy.max_restarts:
        return Option("", f"{used} of {policy.max_restarts} restarts are used")
    doing = f"the job restarts all ranks (restart {used + 1} of {policy.max_restarts})"
    return Option(doing, situation.worn_out)


def is_met_by_restart(policy: Policy, situation: Situation) -> bool:
    """Return whether a restart of all ranks that is in progress is enough for this fault."""
    return _restart(policy, situation) is not None and not history.resets(situation.fault)


def _reschedule_pod(policy: Policy, situation: Situation) -> Option | None:
    if not _leaves_its_place(situation):
        return None
    used = history.used(situation.past, (Strategy.RESCHEDULE_POD,))
    if situation.failed_already(Strategy.RESCHEDULE_POD):
        why_not = "the platform could not place its pod again"
    elif history.counts(situation.fault) and used >= policy.max_pod_reschedules:
        why_not = f"{used} of {policy.max_pod_reschedules} pod reschedules are used"
    else:
        why_not = _not_offered(Strategy.RESCHEDULE_POD, situation) or _stays(situation)
        why_not = why_not or _comes_back(policy, situation)
    doing = (
        "the platform places only its pod again, on another node, and the job restarts all ranks"
    )
    return Option(doing, why_not, _blames(situation))


def _reschedule_job_isolated(policy: Policy, situation: Situation) -> Option | None:
    if not _blames(situation) or situation.failed_already(Strategy.RESCHEDULE_POD):
        return None
    if not policy.max_reschedules:
        return None  # the user did not allow it
    doing = "the platform places the whole job again, without that node"
    why_not = _hinders_job(Strategy.RESCHEDULE_JOB_ISOLATED, policy, situation)
    return Option(doing, why_not or _stays(situation), isolate=True)


def _reschedule_job(policy: Policy, situation: Situation) -> Option | None:
    """Place the job again, if no other strategy helps or a pod's reschedule has failed."""
    fault = situation.fault
    worn_out_by_user = fault.user_caused and (fault.reset_failed or bool(situation.worn_out))
    degraded = situation.failed_already(Strategy.RESCHEDULE_POD) or worn_out_by_user
    isolates = _blames(situation) and Strategy.RESCHEDULE_JOB_ISOLATED in policy.strategies
    if fault.kind in (FaultKind.HANG, FaultKind.REPLICAS) or (isolates and not degraded):
        return None
    if not policy.max_reschedules and history.counts(fault):
        return None  # the user did not allow it
    why_not = _hinders_job(Strategy.RESCHEDULE_JOB, policy, situation)
    conditional = degraded or fault.kind in (FaultKind.EVICTION, FaultKind.SCHEDULING)
    if not why_not and not conditional:
        why_not = _hinders_unconditional(policy, situation)
    return Option("the platform places the whole job again", why_not)


STRATEGIES: dict[Strategy, StrategyFunction] = {
    Strategy.RETRY: _retry,
    Strategy.RECOVER_IN_PLACE: _recover_in_place,
    Strategy.RECOVER: _recover,
    Strategy.SHRINK: _shrink,
    Strategy.HANG_RESTART: _hang_restart,
    Strategy.RESTART: _restart,
    Strategy.RESCHEDULE_POD: _reschedule_pod,
    Strategy.RESCHEDULE_JOB_ISOLATED: _reschedule_job_isolated,
    Strategy.RESCHEDULE_JOB: _reschedule_job,
}


# ---- the place of the fault, and whether that place is the cause


def _is_lost_apart(situation: Situation) -> bool:
    """Return whether a rank or node is lost while the ranks of a Session do not train together."""
    fault = situation.fault
    is_loss = fault.kind in _LOSSES and not fault.user_caused
    return (situation.starting or situation.is_over) and is_loss


def _is_bound_to_a_rank(situation: Situation) -> bool:
    """Return whether one process is broken or must end, and can restart."""
    fault = situation.fault
    broken = fault.kind in _IN_PLACE or (situation.dead and fault.kind is FaultKind.LINK)
    return broken and fault.rank >= 0


def _is_beyond_reset(situation: Situation) -> bool:
    """Return whether a device is permanently unusable: by its code, or because repair failed."""
    fault = situation.fault
    if fault.user_caused or fault.kind not in SICK:
        return False
    hopeless = fault.kind is FaultKind.DEVICE and not fault.reset_helps and bool(fault.code)
    return fault.reset_failed or hopeless or bool(situation.worn_out)


def _leaves_its_place(situation: Situation) -> bool:
    """Return whether the ranks of the node must move to another node."""
    fault = situation.fault
    if fault.kind is FaultKind.DEVICE and not fault.code and not fault.user_caused:
        return True  # the rank gave its device up; a new process may still be able to use it
    return fault.kind in (*_GONE, FaultKind.NODE, FaultKind.STRAGGLER) or _is_beyond_reset(
        situation
    )


def _blames(situation: Situation) -> bool:
    """Return whether to isolate the place: never for an eviction or a fault of the user.

    The reason for a lost agent is unknown, so it does not condemn the only machine of a job.
    """
    fault = situation.fault
    spared = situation.only_host and fault.kind is FaultKind.NODE_LOST
    return fault.of_hardware and _leaves_its_place(situation) and not spared


def _stays(situation: Situation) -> str:
    """Return why the job cannot leave the place of the fault; empty: it can, or need not."""
    return "the job has no other machine" if situation.only_host and _blames(situation) else ""


def _is_sick(situation: Situation) -> bool:
    """Return whether the place is known to be faulty.

    The reason for a lost agent is unknown. ModelArts isolates nodes when it reschedules, and it has
    no cheaper strategy. Hosts that are lost repeatedly are lemons.
    """
    return _blames(situation) and situation.fault.kind is not FaultKind.NODE_LOST


def _comes_back(policy: Policy, situation: Situation) -> str:
    """Return why a new node alone does not help: it may run on the same host; otherwise nothing.

    This applies only if the whole job can leave the host. All other strategies would also stay on
    the host.
    """
    if not (_is_sick(situation) and situation.comes_back) or situation.spares:
        return ""
    leaves = Strategy.RESCHEDULE_JOB_ISOLATED
    option = _reschedule_job_isolated(policy, situation) if leaves in policy.strategies else None
    possible = option is not None and not option.why_not
    return "a new node may start on the same host" if possible else ""


# ---- obstacles of a strategy


def _hinders_inner(strategy: Strategy, policy: Policy, situation: Situation) -> str:
    """Return why a strategy of INNER is not available; empty: it is. Each of them calls it.

    The strategy needs a Session, and a formed generation or a loss before the first one. It uses up
    `max_recoveries` and `max_in_row`.
    """
    moves = strategy in _MOVES
    if strategy not in STARTS_NO_PROCESS and situation.session and not situation.can_join:
        return "a new process cannot join the collectives of the running processes"
    if strategy in STARTS_NO_PROCESS and not situation.formed and situation.session:
        return _NOT_FORMED
    why_not = _out_of_reach(policy, situation, _MOVES if moves else _STAYS)
    if why_not or moves:
        return why_not
    if situation.worn_out:
        return situation.worn_out
    if strategy is Strategy.RECOVER_IN_PLACE:
        hopeless = situation.fault.reset_failed or _is_beyond_reset(situation)
        return "a reset cannot repair its device" if hopeless else ""
    # A repair that did not last is not tried again while a stronger strategy is available.
    repaired = situation.fault.kind in _IN_PLACE and strategy in _same_place(situation)
    if repaired and _is_outdone(strategy, policy, situation):
        return f"the problem returned after {strategy.value}"
    return ""


def _is_outdone(strategy: Strategy, policy: Policy, situation: Situation) -> bool:
    """Return whether a later strategy of the policy is also available."""
    later = policy.ladder[policy.ladder.index(strategy) + 1 :]
    options = (
        STRATEGIES[other](policy, situation) for other in later if other in policy.strategies
    )
    return any(option is not None and not option.why_not for option in options)


def _out_of_reach(policy: Policy, situation: Situation, strategies: tuple[Strategy, ...]) -> str:
    """Return why none of these inner strategies is available; empty: one is.

    If a recovery in place did not last, the job tries one on another node.
    """
    if situation.is_over:
        return "training is over, so no new process can join the other ranks"
    if not situation.session:
        known = "before a rank reaches its Session, a restart of all ranks takes no longer"
        return known if situation.starting else "ranks without a Session cannot wait for each other"
    if not situation.formed and not _is_lost_apart(situation):
        return _NOT_FORMED
    in_row = sum(strategy in strategies for strategy in _same_place(situation))
    elsewhere = strategies is _MOVES and not _leaves_its_place(situation)
    if elsewhere and in_row and Strategy.RECOVER_IN_PLACE in policy.strategies:
        return (
            f"the job recovered {situation.fault.blamed()} on another node, but has not finished a "
            "step since then"
        )
    if in_row >= policy.max_in_row and history.counts(situation.fault):
        return (
            f"the job recovered {situation.fault.blamed()} {in_row} times without a finished step "
            "in between"
        )
    hangs = history.hangs_in_row(situation.past, situation.fault, situation.newest)
    if situation.fault.kind is FaultKind.HANG and hangs >= policy.max_in_row:
        return f"the job hung {hangs} times without a finished step in between"
    return _spent(policy, situation)


def _spent(policy: Policy, situation: Situation) -> str:
    used = history.recoveries_used(situation.past)
    if used >= policy.max_recoveries and history.counts(situation.fault):
        return f"{used} of {policy.max_recoveries} recoveries are used"
    return ""


def _same_place(situation: Situation) -> list[Strategy]:
    """Return inner recoveries of the same place, latest first, without a finished step between.

    A failed source of a rank's state does not count, because the number of sources is limited.
    Evictions do not count either.
    """
    found = []
    for past in history.since_last_step(situation.past, situation.newest):
        if not history.counts(past.fault):
            continue
        if past.strategy not in INNER:
            break
        restore = FaultKind.RESTORE in (past.fault.kind, situation.fault.kind)
        if restore and past.fault.signature != situation.fault.signature:
            continue
        if (past.fault.rank, past.fault.node) == (situation.fault.rank, situation.fault.node):
            found.append(past.strategy)
    return found


def _hinders_job(strategy: Strategy, policy: Policy, situation: Situation) -> str:
    used = history.used(situation.past, JOBS)
    if history.counts(situation.fault) and used >= policy.max_reschedules:
        return f"{used} of {policy.max_reschedules} reschedules are used"
    return _not_offered(strategy, situation)


def _hinders_unconditional(policy: Policy, situation: Situation) -> str:
    if not policy.unconditional:
        return "no node or device is the cause, and reschedule-job is not unconditional"
    row = _in_row(policy, situation, Strategy.RESCHEDULE_JOB)
    if row >= policy.max_reschedules_in_row:
        return (
            f"the platform placed the job again {row} consecutive times without a fault of a "
            "node or device in between; the script is the likely cause"
        )
    return ""


def _not_offered(strategy: Strategy, situation: Situation) -> str:
    return "" if strategy in situation.engine else f"the engine does not support {strategy.value}"
