"""What the journal tells of checkpoints, see rekindle.recovery.journal.journal."""

from __future__ import annotations

import msgspec

from rekindle.recovery.faults.fault import Fault
from rekindle.words import listed


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One thing that happened; `seq` counts up by one, `at` is seconds since the epoch."""

    seq: int = 0
    at: float = 0.0


class Checkpointed(Event, frozen=True, kw_only=True, tag="checkpointed"):
    step: int
    path: str
    bytes: int
    seconds: float


class CheckpointFailed(Event, frozen=True, kw_only=True, tag="checkpoint-failed"):
    """A checkpoint could not be written; training goes on. An incident of its own."""

    incident: int
    fault: Fault


class CheckpointSkipped(Event, frozen=True, kw_only=True, tag="checkpoint-skipped"):
    """A newer checkpoint was passed over on restore, because it is not valid."""

    path: str
    reason: str


class CheckpointLeftOut(Event, frozen=True, kw_only=True, tag="checkpoint-left-out"):
    """A checkpoint that was due was not written, for the store was busy; training went on."""

    step: int
    reason: str

    def in_words(self) -> str:
        """Say what was not done, and why."""
        return f"no checkpoint of step {self.step}: {self.reason}"


class CheckpointInterval(Event, frozen=True, kw_only=True, tag="checkpoint-interval"):
    """From now on so many steps lie between two checkpoints; seconds: which they take, if known."""

    steps: int
    seconds: float
    reason: str

    def in_words(self) -> str:
        """Say what holds from now on, and why."""
        about = f" (about {self.seconds:.0f} s)" if self.seconds else ""
        return f"from now on a checkpoint every {self.steps} steps{about}: {self.reason}"


class CheckpointsPruned(Event, frozen=True, kw_only=True, tag="checkpoints-pruned"):
    """Checkpoints that no rule keeps were removed (step, generation).

    error: what could not be done, or is amiss.
    """

    removed: tuple[tuple[int, int], ...] = ()
    error: str = ""

    def in_words(self) -> str:
        """Say what was done."""
        steps = listed("step", [step for step, _ in self.removed])
        done = f"checkpoints of {steps} were removed" if self.removed else ""
        return "; ".join(filter(None, (done, self.error)))
