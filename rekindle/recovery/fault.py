"""What went wrong: a fault is a value with its evidence, and how an exit becomes one."""

from __future__ import annotations

import enum
import signal

import msgspec


class Kind(str, enum.Enum):
    """Kinds of fault (design section 3); later sources add to the list."""

    PROCESS = "process"  # a process died by a signal
    USER_CODE = "user-code"  # the script raised, or exited with a status of its own
    LINK = "link"  # a collective failed and no process is known to be broken
    TRANSIENT = "transient"  # the script says that this exception passes
    DEVICE_MEMORY = "device-memory"  # an uncorrectable error in the memory of a rank's device
    DEVICE = "device"  # a rank's device that the rank itself cannot make usable again
    NODE_LOST = "node-lost"  # the agent is gone, and all ranks of its node with it
    STUCK = "stuck"  # a rank did not leave its collective in time
    RESTORE = "restore"  # a rank could not take its state from the source the plan named
    COORDINATOR = "coordinator-lost"  # the job's coordinator died; another took its place
    STORAGE = "storage"  # a checkpoint could not be written
    LAUNCH = "launch"  # the ranks could not be started at all


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended: one of `code` (0..255) and `signal` (a number) is set."""

    code: int | None = None
    signal: int | None = None

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
    had finished; `signature` is equal for two faults that look the same to a person.
    """

    kind: Kind
    message: str
    rank: int = -1
    node: int = -1
    finished: int = 0
    signature: str = ""
    traceback: str = ""
    at: float = 0.0

    def blamed(self) -> str:
        """Say in words where the fault is."""
        if self.rank >= 0:
            return f"rank {self.rank}" + (f" on node {self.node}" if self.node >= 0 else "")
        return f"node {self.node}" if self.node >= 0 else "the job"


# How likely a fault is the cause of the others seen with it, most likely first: a dead process
# breaks its peers' links, never the other way round.
_CAUSES = (
    Kind.LAUNCH,
    Kind.USER_CODE,
    Kind.NODE_LOST,
    Kind.DEVICE,
    Kind.DEVICE_MEMORY,
    Kind.PROCESS,
    Kind.STUCK,
    Kind.TRANSIENT,
    Kind.RESTORE,
    Kind.COORDINATOR,
    Kind.LINK,
    Kind.STORAGE,
)


def root_cause(faults: list[Fault]) -> Fault:
    """Return the fault that most likely caused the others: by kind, then the earliest."""
    return min(faults, key=lambda fault: (_CAUSES.index(fault.kind), fault.at))


def fault_of_exit(
    exit_: Exit, error: ErrorRecord | None, *, rank: int, node: int, finished: int, at: float
) -> Fault:
    """Classify the end of a rank that should have gone on.

    A signal is a fault of the process; a status of its own is the script's doing.
    """
    if exit_.signal is not None and error is None:
        kind, message = Kind.PROCESS, f"rank {rank} was ended by {exit_}"
    elif error is not None:
        kind, message = Kind.USER_CODE, f"rank {rank} raised {error.message}"
    else:
        kind, message = Kind.USER_CODE, f"rank {rank} ended with {exit_}"
    return Fault(
        kind=kind,
        message=message,
        rank=rank,
        node=node,
        finished=finished,
        signature=error.message if error else str(exit_),
        traceback=error.traceback if error else "",
        at=error.at if error and error.at else at,
    )
