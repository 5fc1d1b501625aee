"""Define the events of checkpoints for rekindle.recovery.journal.journal."""

from __future__ import annotations

from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.journal.event import Event
from rekindle.words import listed


class Checkpointed(Event, frozen=True, kw_only=True, tag="checkpointed"):
    step: int
    path: str
    bytes: int
    seconds: float


class CheckpointFailed(Event, frozen=True, kw_only=True, tag="checkpoint-failed"):
    """Record that a checkpoint write failed; training continues. It is an incident of its own."""

    incident: int
    fault: Fault


class CheckpointSkipped(Event, frozen=True, kw_only=True, tag="checkpoint-skipped"):
    """Record that a restore skipped a newer checkpoint, because that was invalid."""

    path: str
    reason: str


class CheckpointLeftOut(Event, frozen=True, kw_only=True, tag="checkpoint-left-out"):
    """Record that a due checkpoint was not written, because the store was busy.

    Training continues.
    """

    step: int
    reason: str

    def in_words(self) -> str:
        """Return the omission and its reason as text."""
        return f"no checkpoint of step {self.step}: {self.reason}"


class CheckpointInterval(Event, frozen=True, kw_only=True, tag="checkpoint-interval"):
    """Record a new number of steps between checkpoints.

    `seconds` is the time of these steps, if known.
    """

    steps: int
    seconds: float
    reason: str

    def in_words(self) -> str:
        """Return the new interval and its reason as text."""
        about = f" (about {self.seconds:.0f} s)" if self.seconds else ""
        return f"the job now writes a checkpoint every {self.steps} steps{about}: {self.reason}"


class CheckpointsPruned(Event, frozen=True, kw_only=True, tag="checkpoints-pruned"):
    """Record the removal of checkpoints that no rule keeps, as (step, generation).

    `error` describes a failed removal or another problem.
    """

    removed: tuple[tuple[int, int], ...] = ()
    error: str = ""

    def in_words(self) -> str:
        """Return the removal as text."""
        steps = listed("step", [step for step, _ in self.removed])
        done = f"the job removed the checkpoints of {steps}" if self.removed else ""
        return "; ".join(filter(None, (done, self.error)))


class FinalCheckpoint(Event, frozen=True, kw_only=True, tag="final-checkpoint"):
    """Record that a node starts or has ended its final checkpoint, because the job ends.

    At the end, either `path` or `error` is set.
    """

    node: int
    step: int
    path: str = ""
    error: str = ""

    def in_words(self) -> str:
        """Return the state of the final checkpoint in one line."""
        if self.error:
            return f"final checkpoint: node {self.node} could not write it: {self.error}"
        if self.path:
            at = f"final checkpoint: step {self.step} is at {self.path}"
            return f"{at}; the next attempt of this job continues from it"
        return f"final checkpoint: node {self.node} writes its snapshot of step {self.step}"
