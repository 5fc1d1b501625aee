"""A fault of a trial: a process, a signal, and a moment."""

from __future__ import annotations

import dataclasses
import enum


class Victim(str, enum.Enum):
    """A process of a job."""

    RANK = "rank"
    WORKER = "DataLoader worker"
    FORK_SERVER = "fork server"
    STORE = "store"
    AGENT = "agent"
    SPARE = "agent of the spare"
    COORDINATOR = "coordinator"
    LAUNCHER = "launcher"
    FLOW = "flow process"


class Act(str, enum.Enum):
    """The signals that the process gets."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    STOP = "SIGSTOP"
    PAUSE = "SIGSTOP, later SIGCONT"


class Moment(str, enum.Enum):
    """The moment from which the delay of a fault counts."""

    LAUNCH = "when the process exists"
    START = "when the ranks have started"
    TRAINING = "in training"
    RECOVERY = "in the recovery of a killed rank"
    CHECKPOINT = "when a checkpoint is due"
    END = "after the last step"


# After the kill of a rank, a fault in a recovery waits for one of these events.
RECOVERY_EVENTS = ("fault", "ranks-started", "formed")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    `step`: the fault comes after all ranks have finished this number of steps.
    `delay_s`: seconds from the moment to the signal.
    `number`: chooses one of several processes of the same kind.
    `killed`: the rank that is killed first, if the moment is a recovery.
    `event`: the journal event after that kill, from which the delay counts.
    `paused_s`: seconds between SIGSTOP and SIGCONT. 0: no SIGCONT follows.
    """

    victim: Victim
    act: Act
    moment: Moment
    step: int = 0
    delay_s: float = 0.0
    number: int = 0
    killed: int = 0
    event: str = ""
    paused_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.act.value} of {self.victim.value} {self.number} {self.moment.value}"]
        if self.moment in (Moment.TRAINING, Moment.CHECKPOINT, Moment.RECOVERY):
            parts.append(f"after step {self.step}")
        if self.moment is Moment.RECOVERY:
            parts.append(f"(rank {self.killed}, at the event {self.event})")
        parts.append(f"+ {self.delay_s:.2f} s")
        if self.paused_s:
            parts.append(f"for {self.paused_s:g} s")
        return " ".join(parts)
