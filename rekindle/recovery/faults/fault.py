"""What went wrong: a fault is a value with its evidence, and how an exit becomes one."""

from __future__ import annotations

import enum
import signal

import msgspec


class FaultKind(str, enum.Enum):
    """Kinds of fault (design section 3); later sources add to the list."""

    PROCESS = "process"  # a process died by a signal
    USER_CODE = "user-code"  # the script raised, or exited with a status of its own
    LINK = "link"  # a collective failed and no process is known to be broken
    TRANSIENT = "transient"  # the script says that this exception passes
    DEVICE_MEMORY = "device-memory"  # an uncorrectable error in the memory of a rank's device
    DEVICE = "device"  # a rank's device that the rank itself cannot make usable again
    NODE_LOST = "node-lost"  # the agent is gone, and all ranks of its node with it
    STUCK = "stuck"  # a rank did not leave its collective in time
    HANG = "hang"  # the job or a device makes no progress, and nothing ended
    RESTORE = "restore"  # a rank could not take its state from the source the plan named
    COORDINATOR = "coordinator-lost"  # the job's coordinator died; another took its place
    STORAGE = "storage"  # a checkpoint could not be written
    LAUNCH = "launch"  # the ranks could not be started at all
    HOST_OOM = "host-out-of-memory"  # the host, or the container, had no memory left
    DEVICE_OOM = "device-out-of-memory"  # a device had no memory left; the device is sound
    NODE = "node"  # a node is sick, and its agent is still there
    STRAGGLER = "straggler"  # a rank or node is slow, and so are all that wait for it
    EVICTION = "eviction"  # the platform took the place away: eviction, preemption, drain
    SCHEDULING = "scheduling"  # the platform finds no place, or cannot start what it placed
    UNKNOWN = "unknown"  # nothing tells what it was


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended: one of `code` (0..255) and `signal` (a number) is set."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, status: int) -> Exit:
        """Return the exit of a status as `subprocess` has it: below 0 it is a signal."""
        return cls(signal=-status) if status < 0 else cls(code=status)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit status {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:  # a real-time signal has no name
            return f"signal {self.signal}"


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended a rank, as its error file tells it."""

    message: str  # "ValueError: ..."; one line
    traceback: str = ""
    at: float = 0.0  # seconds since the epoch, by the clock of the rank's node


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong.

    `rank` and `node` say where (-1: not bound to one); `finished` is the number of steps the rank
    had finished; `signature` is equal for two faults that look the same to a person, and empty
    where nothing tells what it was.

    host: the machine, by a name that it keeps from job to job; empty: nobody said. device: its
    number there. code: as the tables spell it. user_caused: the user's code or input made it, so
    no place is to blame. reset_helps: a reset of the device may help; reset_failed: it did not.
    counts: recovering from it uses up a budget.
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
    reset_failed: bool = False
    counts: bool = True

    @property
    def of_hardware(self) -> bool:
        """Whether a node or device is to blame for certain."""
        return self.kind in _HARDWARE and not self.user_caused

    def same_as(self, other: Fault) -> bool:
        """Whether it is the same error of the same rank at the same step."""
        mine = (self.rank, self.finished, self.signature)
        return mine == (other.rank, other.finished, other.signature)

    def looks_like(self, other: Fault) -> bool:
        """Whether a person would call it the same problem: one kind, and one sort of exception.

        What an exception says besides, as addresses and times, differs from time to time.
        """
        sorts = (fault.signature.partition(":")[0] for fault in (self, other))
        return self.kind is other.kind and len(set(sorts)) == 1

    def blamed(self) -> str:
        """Say in words where the fault is."""
        if self.rank >= 0:
            return f"rank {self.rank}" + (f" on node {self.node}" if self.node >= 0 else "")
        return f"node {self.node}" if self.node >= 0 else "the job"


SICK = (
    FaultKind.NODE,
    FaultKind.DEVICE,
    FaultKind.DEVICE_MEMORY,
)  # a place that is there, and known to be bad
_HARDWARE = (FaultKind.NODE_LOST, FaultKind.STRAGGLER, *SICK)

# How likely a fault is the cause of the others seen with it, most likely first: a dead process
# breaks its peers' links, never the other way round. An eviction ends processes and takes nodes; a
# host without memory kills a process.
_CAUSES = (
    FaultKind.LAUNCH,
    FaultKind.EVICTION,
    FaultKind.SCHEDULING,
    FaultKind.USER_CODE,
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
    FaultKind.STRAGGLER,
    FaultKind.UNKNOWN,
)


def root_cause(faults: list[Fault]) -> Fault:
    """Return the fault that most likely caused the others: by kind, then the earliest."""
    return min(faults, key=lambda fault: (_CAUSES.index(fault.kind), fault.at))
