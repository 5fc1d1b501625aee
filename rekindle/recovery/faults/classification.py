"""Convert an observation into a fault: the end of a process, or a health event. Pure."""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import ErrorRecord, Exit, Fault, FaultKind
from rekindle.recovery.faults.tables.keys import ascend_key
from rekindle.recovery.faults.tables.verdict import (
    Blame,
    FaultOrigin,
    Severity,
    Urgency,
    Verdict,
    unlisted,
)

if TYPE_CHECKING:
    from rekindle.recovery.faults.tables.tables import Tables

# A rank with any other kind of fault ends, or reports the fault itself.
CERTAIN = (FaultKind.DEVICE, FaultKind.NODE, FaultKind.NODE_LOST, FaultKind.EVICTION)


def fault_of_exit(  # noqa: PLR0913  a fault has this number of facts
    judge: Tables,
    exit_: Exit,
    error: ErrorRecord | None,
    *,
    rank: int,
    node: int,
    finished: int,
    at: float,
    no_memory: bool = False,
    said: str = "",
) -> Fault:
    """Classify the unexpected end of a rank. said: the end of its output, for the message.

    The exception of the rank determines the fault, if there is one. An exception without a table
    entry is an error of the script. `no_memory` means that the kernel killed processes because of
    low memory. A killed rank was one of them, or a helper of the rank that was lost.
    """
    if error is not None:
        verdict = judge.exception(error.message, text_of_script=error.text_of_script)
        message = f"rank {rank} raised {error.message}"
        kind = verdict.kind if verdict.listed else FaultKind.USER_CODE
        killed = kind is FaultKind.PROCESS
    else:
        verdict = judge.exit(exit_)
        # "rank 1 was ended by signal 9 (SIGKILL)", "rank 1 ended with exit status 3"
        ended = "was ended by" if exit_.signal is not None else "ended with"
        message, kind = f"rank {rank} {ended} {exit_}", verdict.kind
        killed = exit_.signal == signal.SIGKILL
    if no_memory and killed:
        kind, message = FaultKind.HOST_OOM, f"{message}, because the node had no memory left"
    elif kind not in (FaultKind.PROCESS, FaultKind.USER_CODE):
        message = f"{message} ({verdict.explanation})"
    if said:
        message = f"{message}; the end of its stderr: {said}"
    return Fault(
        kind=kind,
        message=message,
        rank=rank,
        node=node,
        finished=finished,
        signature=_signature(exit_, error),
        traceback=error.traceback if error else "",
        at=error.at if error and error.at else at,
        code=verdict.code,
        user_caused=verdict.user_caused or kind is FaultKind.USER_CODE,
        reset_helps=verdict.reset_helps,
        restart_heals=verdict.restart_heals,
        counts=verdict.counts,
    )


def _signature(exit_: Exit, error: ErrorRecord | None) -> str:
    if error is not None:
        return error.message
    return str(exit_) if exit_.signal is not None else ""  # a status may stand for any error


class EventSource(str, enum.Enum):
    """Name the sources that define the meaning of a health event."""

    ASCEND = "ascend"  # a fault code of an Ascend chip
    XID = "xid"  # the number of an XID of NVIDIA's driver
    KERNEL = "kernel"  # a line of the kernel's log
    NODE_CONDITION = "node-condition"  # Type=Status of a Kubernetes node
    POD_REASON = "pod-reason"  # why Kubernetes does not run a pod
    # the state of MindCluster's own recovery of a rank: fault, recovered, failed
    MINDCLUSTER = "mindcluster"
    NOTICE = "notice"  # the platform announces that a host will end, in words


class HealthEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe what a monitor, an engine or a person has seen on a node.

    - `what`: the code, number, line, condition or reason.
    - `node`: its rank; -1: the nodes on `host`.
    - `device`: its local number; -1: no particular device.
    - `gone`: the health event has ended.
    - `by`: the reporter.
    - `severity`, `origin`: for an Ascend code that may have no table entry. `origin` None means the
      chip that `device` names, or the board of the node without one.
    - `host`: the host of the node at that time, if the reporter knows it. The node may be on
      another host now.
    - `within_s`: the seconds until the host ends, for a notice; 0: unknown.
    - `address`: the address of its pod at that time. The pod may be another one now.
    - `run`: how often the container had restarted.
    - `exit_code`: the exit status of the container, for the reason of a pod.
    """

    source: EventSource
    what: str
    node: int = -1
    device: int = -1
    gone: bool = False
    by: str = ""
    severity: Severity | None = None
    origin: FaultOrigin | None = None
    host: str = ""
    within_s: float = 0.0
    address: str = ""
    run: int = 0
    exit_code: int | None = None

    def in_words(self) -> str:
        """Return the health event as a short text."""
        where = f"device {self.device} of node {self.node}" if self.device >= 0 else ""
        return f"{self.source.value} {self.what} on {where or f'node {self.node}'}"


def verdict_of(judge: Tables, health_event: HealthEvent) -> Verdict:
    """Look a health event up. Raises UsageError: the health event is invalid."""
    what = health_event.what.strip()
    if health_event.source is not EventSource.ASCEND and (
        health_event.severity,
        health_event.origin,
    ) != (None, None):
        raise UsageError(f"severity and origin apply only to Ascend codes, and {what!r} is not one")
    match health_event.source:
        case EventSource.ASCEND:
            if ascend_key(what) is None:
                raise UsageError(
                    f"{what!r} is not a fault code; write 8 or 9 hexadecimal digits, for example "
                    "80E01801"
                )
            origin = health_event.origin or (
                FaultOrigin.CHIP if health_event.device >= 0 else FaultOrigin.NODE
            )
            return judge.ascend(what, health_event.severity, origin)
        case EventSource.XID:
            if not (what.isascii() and what.isdigit() and len(what) < 6):
                raise UsageError(f"XID {what!r} is not a number")
            return judge.xid(int(what))
        case EventSource.KERNEL:
            return judge.kernel_line(what)
        case EventSource.NODE_CONDITION:
            condition, separator, status = what.partition("=")
            if not separator or status not in ("True", "False", "Unknown"):
                raise UsageError(
                    f"{what!r} is not a condition; write Type=True, Type=False or Type=Unknown"
                )
            return judge.node_condition(condition, status)
        case EventSource.POD_REASON:
            return judge.pod_reason(what, health_event.exit_code)
        case EventSource.NOTICE:
            text = f"the platform announces the end of the host: {what or 'without a reason'}"
            return unlisted(FaultKind.PLANNED, text, Urgency.SOON)
        case EventSource.MINDCLUSTER:  # MindCluster acts on its own, and the ranks show the result
            text = f"MindCluster's own recovery reports it as {what}"
            return unlisted(FaultKind.UNKNOWN, text, Urgency.WATCH)


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict with the highest urgency; the first of equals."""
    order = list(Urgency)
    return max(verdicts, key=lambda verdict: order.index(verdict.urgency))


def fault_of_event(
    health_event: HealthEvent, verdict: Verdict, *, rank: int, finished: int, at: float
) -> Fault:
    """Convert a health event into a fault. `rank` is the rank of the device, or -1."""
    return Fault(
        kind=_kind_of(verdict),
        message=f"{health_event.in_words()}: {verdict.explanation}",
        rank=rank,
        node=health_event.node,
        finished=finished,
        signature=f"{health_event.source.value} {verdict.code or health_event.what}",
        at=at,
        device=health_event.device,
        code=verdict.code,
        user_caused=verdict.user_caused,
        reset_helps=verdict.reset_helps,
        restart_heals=verdict.restart_heals,
        counts=verdict.counts,
    )


def _kind_of(verdict: Verdict) -> FaultKind:
    """Return the kind of fault of a health event.

    A node at fault is unhealthy, regardless of the broken part. If a reset cannot repair device
    memory, the device has failed, because the rank's own repair does not help.
    """
    kind = verdict.kind
    if verdict.urgency is not Urgency.NOW:
        return kind
    if verdict.at_fault is Blame.NODE and kind not in CERTAIN:
        return FaultKind.NODE
    separate = verdict.at_fault is Blame.DEVICE and not verdict.reset_helps
    return FaultKind.DEVICE if separate and kind is FaultKind.DEVICE_MEMORY else kind


def is_vague(fault: Fault) -> bool:
    """Return whether the fault shows that a rank ended, but not why."""
    bare_status = fault.kind is FaultKind.USER_CODE and not fault.signature
    return not fault.code and (bare_status or fault.kind in (FaultKind.PROCESS, FaultKind.UNKNOWN))


def explains(cause: Fault, fault: Fault) -> bool:
    """Return whether a health event explains a rank's fault or end, or the loss of a node."""
    if fault.kind is FaultKind.NODE_LOST:
        return cause.rank < 0 and cause.node == fault.node
    may_explain = is_vague(fault) or (fault.kind is cause.kind and not fault.code)
    return may_explain and bool(cause.code) and cause.rank == fault.rank >= 0


def explained(fault: Fault, cause: Fault) -> Fault:
    """Return the fault with the details of its health event."""
    # A rank that ended by an error of its device's memory cannot repair it, so the device is reset.
    dead = cause.kind is FaultKind.DEVICE_MEMORY and fault.kind is not FaultKind.DEVICE_MEMORY
    return msgspec.structs.replace(
        fault,
        kind=FaultKind.DEVICE if dead else cause.kind,
        message=f"{fault.message} ({cause.message})",
        device=cause.device,
        code=cause.code,
        user_caused=cause.user_caused,
        reset_helps=cause.reset_helps,
        restart_heals=cause.restart_heals,
        counts=cause.counts,
    )
