"""How what was seen becomes a fault: the end of a process, or a sign of trouble. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Protocol

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import ErrorRecord, Exit, Fault, FaultKind
from rekindle.recovery.faults.tables.escalation import Change
from rekindle.recovery.faults.tables.keys import ascend_key
from rekindle.recovery.faults.tables.rows import unlisted
from rekindle.recovery.faults.tables.verdict import Blame, FaultOrigin, Severity, Urgency, Verdict

# A rank that suffers from any other kind of fault ends, or says so itself.
CERTAIN = (FaultKind.DEVICE, FaultKind.NODE, FaultKind.NODE_LOST, FaultKind.EVICTION)


class Judge(Protocol):
    """What the tables of faults are asked here (`recovery.faults.tables.tables.Tables`)."""

    def exit(self, exit_: Exit) -> Verdict: ...
    def text(self, message: str) -> Verdict: ...
    def kernel_line(self, line: str) -> Verdict: ...
    def xid(self, number: int) -> Verdict: ...
    def ascend(self, code: str, severity: Severity | None, origin: FaultOrigin) -> Verdict: ...
    def escalated(self, changes: Iterable[Change], now: float) -> list[Verdict]: ...
    def node_condition(self, condition: str, status: str) -> Verdict: ...
    def pod_reason(self, reason: str) -> Verdict: ...


def fault_of_exit(  # noqa: PLR0913  what there is to know of it
    judge: Judge,
    exit_: Exit,
    error: ErrorRecord | None,
    *,
    rank: int,
    node: int,
    finished: int,
    at: float,
    no_memory: bool = False,
) -> Fault:
    """Classify the end of a rank that should have gone on.

    Its exception speaks for it, if it left one; one that no table knows is the script's own.
    no_memory: the kernel has killed for want of memory; a rank that it has killed was the one.
    """
    if error is not None:
        verdict = judge.text(error.message)
        message = f"rank {rank} raised {error.message}"
        kind = verdict.kind if verdict.listed else FaultKind.USER_CODE
    else:
        verdict = judge.exit(exit_)
        ended = "was ended by" if exit_.signal is not None else "ended with"
        message, kind = f"rank {rank} {ended} {exit_}", verdict.kind
        if no_memory:
            kind, message = FaultKind.HOST_OOM, f"{message}, for the node had no memory left"
    if kind not in (FaultKind.PROCESS, FaultKind.USER_CODE) and not no_memory:
        message = f"{message} ({verdict.explanation})"
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
        counts=verdict.counts,
    )


def _signature(exit_: Exit, error: ErrorRecord | None) -> str:
    if error is not None:
        return error.message
    return str(exit_) if exit_.signal is not None else ""  # a status may stand for any error


class EventSource(str, enum.Enum):
    """Who knows the meaning of a sign."""

    ASCEND = "ascend"  # a fault code of an Ascend chip
    XID = "xid"  # the number of an XID of NVIDIA's driver
    KERNEL = "kernel"  # a line of the kernel's log
    NODE_CONDITION = "node-condition"  # Type=Status of a Kubernetes node
    POD_REASON = "pod-reason"  # why Kubernetes does not run a pod
    MINDCLUSTER = "mindcluster"  # how its own recovery of a rank goes: fault, recovered, failed


class HealthEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a monitor, an engine or a person has seen of a node.

    what: the code, number, line, condition or reason. device: its local number; -1: none is named.
    gone: it is over. by: who says so. severity, origin: of an Ascend code that no table may list;
    origin None: the chip that `device` names, the node's board where it names none. host: what the
    node was on, or is, if whoever says so knows; it may have been lost there, and be elsewhere now.
    address: so of the pod that it was, or is; run: how often its container had been started anew.
    """

    source: EventSource
    what: str
    node: int
    device: int = -1
    gone: bool = False
    by: str = ""
    severity: Severity | None = None
    origin: FaultOrigin | None = None
    host: str = ""
    address: str = ""
    run: int = 0

    def in_words(self) -> str:
        """Name it in a few words."""
        where = f"device {self.device} of node {self.node}" if self.device >= 0 else ""
        return f"{self.source.value} {self.what} on {where or f'node {self.node}'}"


def verdict_of(judge: Judge, sign: HealthEvent) -> Verdict:
    """Look a sign up. Raises UsageError: it cannot be read."""
    what = sign.what.strip()
    if sign.source is not EventSource.ASCEND and (sign.severity, sign.origin) != (None, None):
        raise UsageError(f"severity and origin are those of Ascend codes; {what!r} is none")
    match sign.source:
        case EventSource.ASCEND:
            if ascend_key(what) is None:
                raise UsageError(f"{what!r} is no fault code: write 8 or 9 digits, as 80E01801")
            origin = sign.origin or (FaultOrigin.CHIP if sign.device >= 0 else FaultOrigin.NODE)
            return judge.ascend(what, sign.severity, origin)
        case EventSource.XID:
            if not (what.isascii() and what.isdigit() and len(what) < 6):
                raise UsageError(f"XID {what!r} is no number")
            return judge.xid(int(what))
        case EventSource.KERNEL:
            return judge.kernel_line(what)
        case EventSource.NODE_CONDITION:
            condition, separator, status = what.partition("=")
            if not separator or status not in ("True", "False", "Unknown"):
                raise UsageError(f"{what!r} is no condition; say Type=True, =False or =Unknown")
            return judge.node_condition(condition, status)
        case EventSource.POD_REASON:
            return judge.pod_reason(what)
        case (
            EventSource.MINDCLUSTER
        ):  # it acts, and what comes of it is seen in the ranks themselves
            said = f"MindCluster's own recovery has it as {what}"
            return unlisted(FaultKind.UNKNOWN, said, Urgency.WATCH)


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that asks for the most; the first of equals."""
    order = list(Urgency)
    return max(verdicts, key=lambda verdict: order.index(verdict.urgency))


def fault_of_sign(
    sign: HealthEvent, verdict: Verdict, *, rank: int, finished: int, at: float
) -> Fault:
    """Make a fault of a sign. rank: whose device it is, -1: nobody's."""
    return Fault(
        kind=_kind_of(verdict),
        message=f"{sign.in_words()}: {verdict.explanation}",
        rank=rank,
        node=sign.node,
        finished=finished,
        signature=f"{sign.source.value} {verdict.code or sign.what}",
        at=at,
        device=sign.device,
        code=verdict.code,
        user_caused=verdict.user_caused,
        reset_helps=verdict.reset_helps,
        counts=verdict.counts,
    )


def _kind_of(verdict: Verdict) -> FaultKind:
    """Say what a sign is a fault of: a node that is at fault is sick, whatever it has broken.

    Memory that nothing can reset is the end of its device: a rank's own repair is no answer to it.
    """
    kind = verdict.kind
    if verdict.urgency is not Urgency.NOW:
        return kind
    if verdict.at_fault is Blame.NODE and kind not in CERTAIN:
        return FaultKind.NODE
    separate = verdict.at_fault is Blame.DEVICE and not verdict.reset_helps
    return FaultKind.DEVICE if separate and kind is FaultKind.DEVICE_MEMORY else kind


def is_vague(fault: Fault) -> bool:
    """Whether it is told that a rank has ended, but not of what."""
    bare_status = fault.kind is FaultKind.USER_CODE and not fault.signature
    return not fault.code and (bare_status or fault.kind in (FaultKind.PROCESS, FaultKind.UNKNOWN))


def explains(sign: Fault, fault: Fault) -> bool:
    """Whether a sign tells what a rank has met, or what it died of, or why a node was lost."""
    if fault.kind is FaultKind.NODE_LOST:
        return sign.rank < 0 and sign.node == fault.node
    told = is_vague(fault) or (fault.kind is sign.kind and not fault.code)
    return told and bool(sign.code) and sign.rank == fault.rank >= 0


def explained(fault: Fault, sign: Fault) -> Fault:
    """Return the fault with what its sign knows of it."""
    # A rank that has died of its device's memory cannot repair it any more: the device is reset.
    dead = sign.kind is FaultKind.DEVICE_MEMORY and fault.kind is not FaultKind.DEVICE_MEMORY
    return msgspec.structs.replace(
        fault,
        kind=FaultKind.DEVICE if dead else sign.kind,
        message=f"{fault.message} ({sign.message})",
        device=sign.device,
        code=sign.code,
        user_caused=sign.user_caused,
        reset_helps=sign.reset_helps,
        counts=sign.counts,
    )
