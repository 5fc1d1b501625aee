"""Define a fault as a value with its evidence, and convert exits into faults."""

from __future__ import annotations

import enum
import signal

import msgspec


class FaultKind(str, enum.Enum):
    """Name the kinds of fault."""

    PROCESS = "process"  # a signal ended a process
    USER_CODE = "user-code"  # the script raised an exception, or exited with its own status
    LINK = "link"  # a collective failed, and no process is known to be broken
    TRANSIENT = "transient"  # the script declares that this exception is transient
    DEVICE_MEMORY = "device-memory"  # an uncorrectable error in the memory of a rank's device
    DEVICE = "device"  # a rank's device that the rank itself cannot make usable again
    NODE_LOST = "node-lost"  # the agent and all ranks of its node are lost
    STUCK = "stuck"  # a rank did not leave its collective in time
    HANG = "hang"  # the job or a device makes no progress, and no process ended
    RESTORE = "restore"  # a rank could not get its state from the source in the plan
    COORDINATOR = "coordinator-lost"  # the job's coordinator failed; another one replaced it
    STORAGE = "storage"  # a checkpoint write failed
    LAUNCH = "launch"  # the ranks could not start
    SOURCE = "source-changed"  # ranks run different texts of the script or of its modules
    REPLICAS = "replicas"  # ranks that share their state hold different ones
    SKIPPED_STEP = "skipped-step"  # its update would have damaged the model
    HOST_OOM = "host-out-of-memory"  # the host, or the container, ran out of memory
    DEVICE_OOM = "device-out-of-memory"  # a device ran out of memory; the device works
    NODE = "node"  # a node is unhealthy, and its agent still runs
    STRAGGLER = "straggler"  # a rank or node is slow, and the others wait for it
    EVICTION = "eviction"  # the platform removed the place: eviction, preemption, drain
    SCHEDULING = "scheduling"  # the platform finds no place, or cannot start the pod that it placed
    PLANNED = "planned"  # a node is to leave the job; nothing has failed
    UNKNOWN = "unknown"  # no evidence shows the kind


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the end of a process: either `code` (0..255) or `signal` (a number) is set."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, status: int) -> Exit:
        """Return the exit of a `subprocess` status: a negative status is a signal."""
        return cls(signal=-status) if status < 0 else cls(code=status)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit status {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:  # a real-time signal has no name
            return f"signal {self.signal}"


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the exception that ended a rank, from its error file."""

    message: str  # "ValueError: ..."; one line
    traceback: str = ""
    at: float = 0.0  # seconds since the epoch, by the clock of the rank's node
    text_of_script: bool = False  # the script chose the message, so it reports no system fault


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one fault.

    - `rank`, `node`: the place; -1: no particular one.
    - `finished`: the number of steps that the rank had finished.
    - `signature`: equal for two faults that look the same to a person; empty without evidence.
    - `host`: the machine, by a name that is stable between jobs; empty: not reported.
    - `device`: its number on the machine.
    - `code`: in the spelling of the tables.
    - `user_caused`: the user's code or input is the cause, so no place is at fault.
    - `reset_helps`: the device can heal: a reset may help, or a restart alone.
    - `restart_heals`: the end of the processes on the device is enough; it needs no reset.
    - `reset_failed`: a reset did not help.
    - `counts`: recovery from the fault uses up a budget.
    """

    kind: FaultKind
    message: str
    rank: int = -1
    node: int = -1
    finished: int = 0
    signature: str = ""
    traceback: str = ""
    at: float = 0.0
    host: str = ""
    device: int = -1
    code: str = ""
    user_caused: bool = False
    reset_helps: bool = False
    restart_heals: bool = False
    reset_failed: bool = False
    counts: bool = True

    @property
    def of_hardware(self) -> bool:
        """Return whether a node or device is certainly the cause."""
        return self.kind in _HARDWARE and not self.user_caused

    def same_as(self, other: Fault) -> bool:
        """Return whether it is the same error of the same rank at the same step."""
        mine = (self.rank, self.finished, self.signature)
        return mine == (other.rank, other.finished, other.signature)

    def looks_like(self, other: Fault) -> bool:
        """Return whether a person would call it the same problem: one kind, one type of exception.

        The rest of an exception's text varies, for example in addresses and times.
        """
        sorts = (fault.signature.partition(":")[0] for fault in (self, other))
        return self.kind is other.kind and len(set(sorts)) == 1

    def blamed(self) -> str:
        """Return the place of the fault as text."""
        if self.rank >= 0:
            return f"rank {self.rank}" + (f" on node {self.node}" if self.node >= 0 else "")
        return f"node {self.node}" if self.node >= 0 else "the job"


SICK = (
    FaultKind.NODE,
    FaultKind.DEVICE,
    FaultKind.DEVICE_MEMORY,
)  # the place exists and is known to be faulty
_HARDWARE = (FaultKind.NODE_LOST, FaultKind.STRAGGLER, *SICK)

# The most likely cause first, among faults that are seen together. A failed process breaks the
# links of its peers, but not the reverse. An eviction ends processes and removes nodes. A host
# without memory kills a process.
_CAUSES = (
    FaultKind.LAUNCH,
    FaultKind.EVICTION,
    FaultKind.SCHEDULING,
    FaultKind.USER_CODE,
    FaultKind.SOURCE,
    FaultKind.REPLICAS,
    FaultKind.NODE_LOST,
    FaultKind.NODE,
    FaultKind.DEVICE,
    FaultKind.DEVICE_MEMORY,
    FaultKind.HOST_OOM,
    FaultKind.DEVICE_OOM,
    FaultKind.PROCESS,
    FaultKind.STUCK,
    FaultKind.HANG,
    FaultKind.TRANSIENT,
    FaultKind.RESTORE,
    FaultKind.COORDINATOR,
    FaultKind.LINK,
    FaultKind.STORAGE,
    FaultKind.SKIPPED_STEP,
    FaultKind.STRAGGLER,
    FaultKind.PLANNED,
    FaultKind.UNKNOWN,
)


def root_cause(faults: list[Fault]) -> Fault:
    """Return the fault that most likely caused the others: by kind, then the earliest."""
    return min(faults, key=lambda fault: (_CAUSES.index(fault.kind), fault.at))
