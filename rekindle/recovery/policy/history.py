"""Define the input of a decision: the situation, and the history of the job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rekindle.recovery.faults.fault import SICK, Fault, FaultKind
from rekindle.recovery.policy.policy import INNER, OUTER, Strategy

# Source of both values: ModelArts, fault recovery of training jobs, in-place recovery. "The same
# fault code three times in a row within 24 hours on the same device of the same node."
SAME_CODE_TIMES = 3
SAME_CODE_WINDOW_S = 86_400.0


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """Hold an earlier fault of the job, its strategy, and the newest step at that time.

    `incident` is its number; one incident may have several faults. `resumed` is the step from which
    all ranks last started to train together: 0, or the step of the restored state. `rolled_back`
    means that later restores skip that state. `apart` is as in `decide.Decision`.
    """

    fault: Fault
    strategy: Strategy
    newest: int = 0
    incident: int = 0
    resumed: int = 0
    rolled_back: bool = False
    apart: bool = False


def besides(past: Iterable[Past], fault: Fault) -> list[Past]:
    """Return the decisions about other faults.

    A health event may explain a fault after its decision.
    """
    return [each for each in past if not (fault.code and each.fault == fault)]


def used(past: Iterable[Past], strategies: Sequence[Strategy]) -> int:
    """Return how often these strategies were chosen for faults that use up a budget."""
    return sum(each.strategy in strategies and counts(each.fault) for each in past)


def restarts_used(past: Iterable[Past]) -> int:
    """Return the restarts that use up `max_restarts`.

    A restart to reset a device does not, nor one with another budget.
    """
    own = (each for each in past if not _repairs(each.fault) and not each.apart)
    return used(own, (Strategy.RESTART,))


def restarts_apart(past: Sequence[Past], newest: int) -> int:
    """Return the restarts because of ranks that did not train together, since the last progress."""
    return sum(each.apart and counts(each.fault) for each in since_last_step(past, newest))


def recoveries_used(past: Iterable[Past]) -> int:
    """Return the recoveries without another budget.

    They are inner, after a hang, to reset a device, or to run one text of the script.
    """
    return sum(
        each.strategy in (*INNER, Strategy.HANG_RESTART)
        or (each.strategy is Strategy.RESTART and _repairs(each.fault))
        for each in past
        if counts(each.fault)
    )


def _repairs(fault: Fault) -> bool:
    """Return whether a restart of all ranks repairs the cause of the fault."""
    return reset_helps(fault) or fault.kind is FaultKind.SOURCE


def reset_helps(fault: Fault) -> bool:
    """Return whether a device or its memory can heal once no process uses it."""
    return fault.kind in (FaultKind.DEVICE, FaultKind.DEVICE_MEMORY) and fault.reset_helps


def resets(fault: Fault) -> bool:
    """Return whether the agent resets the device, because the fault's code asks for that."""
    return reset_helps(fault) and not fault.restart_heals


def counts(fault: Fault) -> bool:
    """Return whether the fault uses up a budget.

    An eviction never does, however often it occurs.
    """
    return fault.counts and fault.kind is not FaultKind.EVICTION


def same_code(past: Sequence[Past], fault: Fault) -> int:
    """Return the number of consecutive times of this code on a device in 24 hours, including now.

    Another code of the same device ends the sequence. Two decisions about one fault count once.
    They occur if the device could not be reset, or if a health event has explained the fault.
    """
    if not fault.code:
        return 0
    times = {fault.at}
    for each in reversed(past):
        before = each.fault
        if not before.code or _device(before) != _device(fault):
            continue
        if before.code != fault.code or fault.at - before.at > SAME_CODE_WINDOW_S:
            break
        times.add(before.at)
    return len(times)


def _device(fault: Fault) -> tuple[str, int, int]:
    """Return the identity of a device; the node identifies a host without a name."""
    return fault.host, -1 if fault.host else fault.node, fault.device


def in_row(
    past: Sequence[Past], strategy: Strategy, fault: Fault, *, newest: int, progress_resets: bool
) -> int:
    """Return how often a strategy was chosen for this problem without another event in between.

    A fault of a node or device in between ends the sequence, because it explains the earlier
    failures. Another problem and another strategy that restarts ranks also end it. With
    `progress_resets`, a newly finished step also ends it. Events of placement do not count.
    """
    count = 0
    for each in reversed(past):
        if each.fault.of_hardware or (progress_resets and each.newest < newest):
            break
        if (
            each.strategy in INNER
            or each.fault.kind is FaultKind.SCHEDULING
            or not counts(each.fault)
        ):
            continue
        if each.strategy is not strategy or not each.fault.looks_like(fault):
            break
        count += 1
    return count


def since_last_step(past: Sequence[Past], newest: int) -> Iterator[Past]:
    """Yield the decisions since the last progress of the job, the latest first."""
    for each in reversed(past):
        if each.newest < newest:
            return
        yield each


def hangs_in_row(past: Sequence[Past], fault: Fault, newest: int) -> int:
    """Return how often the job has hung since its last progress, regardless of the rank.

    Hangs of several ranks at the same time count as one.
    """
    at = [
        each.fault.at
        for each in since_last_step(past, newest)
        if each.fault.kind is FaultKind.HANG and (not each.fault.at or each.fault.at != fault.at)
    ]
    return len({each for each in at if each}) + at.count(0.0)


def same_errors(past: Sequence[Past], fault: Fault, resumed: int) -> int:
    """Return how often this rank has had this error at this step after the same start."""
    return 1 + sum(
        each.strategy not in INNER and each.resumed == resumed and each.fault.same_as(fault)
        for each in past
    )


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the complete input of a decision.

    - `session`: every rank of the broken generation trains through a Session.
    - `starting`: the script has a Session, and its ranks have not met since they started.
    - `is_over`: the ranks have finished all steps of their Session.
    - `can_join`: a new process can join the process groups of the existing processes.
    - `formed`: the job has formed a generation since the last restart.
    - `dead`: the process of the fault's rank has ended.
    - `newest`: the most steps that any rank of the job has finished.
    - `resumed`: the step from which all ranks last started to train together.
    - `older`: a checkpoint of an earlier step than `resumed` exists.
    - `spares`: the number of spare agents.
    - `left`: the number of nodes with which a smaller world can continue, without lost nodes; 0: it
      cannot.
    - `engine`: the outer strategies that the engine of the job supports.
    - `comes_back`: a new node may run on the host that the job must leave, while the job exists.
    - `only_host`: the job has one machine, so it cannot leave the host of a fault.
    - `final_step`: the step of the newest snapshot, if no checkpoint is as new.
    - `alone`: the world has one node. Only the memory of its agent has the snapshots.
    - `common`: the step of the newest state that all ranks can take; 0: there is none. Only for a
      fault of kind REPLICAS.
    - `own_rule`: the tables of faults have a rule of their own for how often the fault's code may
      occur, which replaces SAME_CODE_TIMES.
    - `incident`: the number of the fault's incident.
    - `past`: the earlier faults and their strategies, the oldest first.
    """

    fault: Fault
    session: bool
    formed: bool
    newest: int
    starting: bool = False
    is_over: bool = False
    can_join: bool = True
    dead: bool = False
    resumed: int = 0
    older: bool = False
    spares: int = 0
    left: int = 0
    engine: tuple[Strategy, ...] = OUTER
    comes_back: bool = False
    only_host: bool = False
    final_step: int | None = None
    alone: bool = False
    common: int = 0
    own_rule: bool = False
    incident: int = 0
    past: tuple[Past, ...] = ()

    @property
    def worn_out(self) -> str:
        """Return how often the device has shown this code, if that is too often; otherwise nothing.

        Only codes of faults of a device or node count.
        """
        counts_here = self.fault.kind in SICK and not self.own_rule
        times = same_code(self.past, self.fault) if counts_here else 0
        if times < SAME_CODE_TIMES:
            return ""
        return f"this device had code {self.fault.code} in {times} consecutive faults within 24 h"

    def failed_already(self, strategy: Strategy) -> bool:
        """Return whether this strategy failed in this incident for this node.

        A scheduling fault does not name the node, so it matches all nodes.
        """
        fault = self.fault
        return any(
            p.strategy is strategy
            and p.incident == self.incident
            and (fault.kind is FaultKind.SCHEDULING or p.fault.node == fault.node)
            for p in self.past
        )
