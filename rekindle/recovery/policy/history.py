"""What a decision may look at: the case, and the history of the job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rekindle.recovery.faults.fault import SICK, Fault, FaultKind
from rekindle.recovery.policy.policy import INNER, OUTER, Strategy

# "The same fault code three times in a row within 24 hours on the same device of the same node":
# ModelArts, fault recovery of training jobs, in-place recovery.
SAME_CODE_TIMES = 3
SAME_CODE_WINDOW_S = 86_400.0


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """One earlier fault of the job, what was chosen for it, and the newest step at that time.

    incident: its number; several faults may belong to one. resumed: the step after which all ranks
    had last begun to train together: 0, or that of the state they had restored. rolled_back: that
    state was passed over from then on.
    """

    fault: Fault
    strategy: Strategy
    newest: int = 0
    incident: int = 0
    resumed: int = 0
    rolled_back: bool = False


def besides(past: Iterable[Past], fault: Fault) -> list[Past]:
    """Return what was decided about other faults: a sign may tell of one after it was decided."""
    return [seen for seen in past if not (fault.code and seen.fault == fault)]


def used(past: Iterable[Past], strategies: Sequence[Strategy]) -> int:
    """Return how often these were chosen for faults that use up a budget."""
    return sum(seen.strategy in strategies and counts(seen.fault) for seen in past)


def restarts_used(past: Iterable[Past]) -> int:
    """Return the restarts that count: one that reset a device is no failure of the job."""
    return used((seen for seen in past if not reset_helps(seen.fault)), (Strategy.RESTART,))


def recoveries_used(past: Iterable[Past]) -> int:
    """Return the recoveries that no other budget bounds: inner, after a hang, to reset a device."""
    return sum(
        seen.strategy in (*INNER, Strategy.HANG_RESTART)
        or (seen.strategy is Strategy.RESTART and reset_helps(seen.fault))
        for seen in past
        if counts(seen.fault)
    )


def reset_helps(fault: Fault) -> bool:
    """Whether a device, or its memory, can be reset once no process uses it."""
    return fault.kind in (FaultKind.DEVICE, FaultKind.DEVICE_MEMORY) and fault.reset_helps


def counts(fault: Fault) -> bool:
    """Whether it uses up a budget. An eviction is nobody's failure, however often it comes."""
    return fault.counts and fault.kind is not FaultKind.EVICTION


def same_code(past: Sequence[Past], fault: Fault) -> int:
    """Return how often a device has shown this code in a row within 24 hours, this time included.

    Another code of the same device ends the row. What was decided twice about one fault, for its
    device could not be reset or a sign has told more of it, is one time.
    """
    if not fault.code:
        return 0
    times = {fault.at}
    for seen in reversed(past):
        before = seen.fault
        if not before.code or _device(before) != _device(fault):
            continue
        if before.code != fault.code or fault.at - before.at > SAME_CODE_WINDOW_S:
            break
        times.add(before.at)
    return len(times)


def _device(fault: Fault) -> tuple[str, int, int]:
    """Return what tells a device from all others; a host without a name is known by its node."""
    return fault.host, -1 if fault.host else fault.node, fault.device


def in_row(
    past: Sequence[Past], strategy: Strategy, fault: Fault, *, newest: int, progress_resets: bool
) -> int:
    """Return how often a strategy was chosen for this problem with nothing between it.

    A fault of a node or device in between ends the row, for then there was a reason; so does
    another problem, another strategy that starts ranks anew, or, if `progress_resets`, a step that
    had not been done before. What the platform does with its places is no part of it.
    """
    count = 0
    for seen in reversed(past):
        if seen.fault.of_hardware or (progress_resets and seen.newest < newest):
            break
        if (
            seen.strategy in INNER
            or seen.fault.kind is FaultKind.SCHEDULING
            or not counts(seen.fault)
        ):
            continue
        if seen.strategy is not strategy or not seen.fault.looks_like(fault):
            break
        count += 1
    return count


def since_last_step(past: Sequence[Past], newest: int) -> Iterator[Past]:
    """Yield what was decided since the job has last made progress, latest first."""
    for seen in reversed(past):
        if seen.newest < newest:
            return
        yield seen


def hangs_in_row(past: Sequence[Past], fault: Fault, newest: int) -> int:
    """Return how often the job has hung since its last progress, whoever was to blame.

    Several ranks that were found at the same time are one hang.
    """
    at = [
        seen.fault.at
        for seen in since_last_step(past, newest)
        if seen.fault.kind is FaultKind.HANG and (not seen.fault.at or seen.fault.at != fault.at)
    ]
    return len({each for each in at if each}) + at.count(0.0)


def same_errors(past: Sequence[Past], fault: Fault, resumed: int) -> int:
    """Return how often this rank has met this error at this step after the same beginning."""
    return 1 + sum(
        seen.strategy not in INNER and seen.resumed == resumed and seen.fault.same_as(fault)
        for seen in past
    )


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision may look at.

    session: every rank of the broken generation trains through a Session.
    joins: a new process can take part in what those that are there have begun.
    formed: a generation of this job has been formed since the last restart.
    dead: the process of the fault's rank has ended.
    newest: most steps finished by any rank of the job.
    resumed: the step after which all ranks had last begun to train together.
    older: a checkpoint of an earlier step than `resumed` could be restored.
    spares: agents in reserve. left: nodes that the world may go on with, without those that are
        lost; 0: it may not.
    engine: the outer strategies that whoever steers the job can carry out.
    comes_back: a new node may come to the very host that it is to leave, while the job stands.
    final_step: the step of the newest snapshot, if no checkpoint is as new.
    incident: number of the fault's incident.
    past: earlier faults and their strategies, oldest first.
    """

    fault: Fault
    session: bool
    formed: bool
    newest: int
    joins: bool = True
    dead: bool = False
    resumed: int = 0
    older: bool = False
    spares: int = 0
    left: int = 0
    engine: tuple[Strategy, ...] = OUTER
    comes_back: bool = False
    final_step: int | None = None
    incident: int = 0
    past: tuple[Past, ...] = ()

    @property
    def worn_out(self) -> str:
        """Say how often the device has shown this code, if that is too often; else nothing.

        A code of what is no fault of a device or node wears nothing out.
        """
        times = same_code(self.past, self.fault) if self.fault.kind in SICK else 0
        if times < SAME_CODE_TIMES:
            return ""
        return f"code {self.fault.code} came {times} times in a row within 24 h on this device"

    def failed_already(self, strategy: Strategy) -> bool:
        """Whether this strategy was tried in this incident, for this node, and did not help.

        Where no place was found, it is not told for which of the nodes.
        """
        fault = self.fault
        return any(
            p.strategy is strategy
            and p.incident == self.incident
            and (fault.kind is FaultKind.SCHEDULING or p.fault.node == fault.node)
            for p in self.past
        )
