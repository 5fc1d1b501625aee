"""The required result of a trial. It follows from the documentation, before the first fault.

Sources: docs/reference/promises.md, docs/operate/running.md (signals), docs/operate/operations.md
(loss of a machine), docs/recover/policy.md (strategies for each kind of fault).
"""

from __future__ import annotations

import dataclasses
import enum

from campaign.faults import Act, Fault, Moment, Victim
from campaign.kinds import SNAPSHOT_EVERY, Kind
from campaign.trials import Trial


class End(str, enum.Enum):
    """The end of an attempt."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    KILLED = "ended with its launcher"


@dataclasses.dataclass(frozen=True)
class Effect:
    """The effect of one fault on the attempt that meets it.

    `ends`: the ends that the attempt may have because of the fault.
    `certain`: whether the attempt has one of these ends. Otherwise it may also succeed.
    `text`: the same in words.
    """

    ends: frozenset[End]
    certain: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Expectation:
    """The required result of a trial.

    In any case the last attempt succeeds, its training equals that of an undisturbed job, and
    nothing is left.

    `effects`: of the faults, in their order.
    `steps_lost`: the most finished steps that the job may lose; None: not stated.
    """

    effects: tuple[Effect, ...]
    steps_lost: int | None

    def __str__(self) -> str:
        lines = [f"  expected: {effect.text}" for effect in self.effects]
        lost = "any number of" if self.steps_lost is None else f"at most {self.steps_lost}"
        lines.append(f"  expected: {lost} steps lost; then the job succeeds, with right digests")
        return "\n".join(lines)


_CONTINUES = Effect(frozenset(), False, "the attempt continues")


def expected(trial: Trial) -> Expectation:
    """Return the required result of a trial."""
    effects = tuple(effect_of(trial.kind, fault) for fault in trial.faults)
    return Expectation(effects, steps_lost(trial))


def effect_of(kind: Kind, fault: Fault) -> Effect:
    """Return the effect of a fault on the attempt that meets it."""
    early = fault.moment is Moment.LAUNCH  # the process may not have its handlers yet
    late = fault.moment is Moment.END  # the job may have ended before
    if fault.victim is Victim.LAUNCHER and fault.act is Act.KILL:
        return _ends(End.KILLED, not late, "the job ends with its launcher")
    if fault.victim is Victim.LAUNCHER and fault.act is Act.TERM:
        ends = {End.STOPPED} | ({End.KILLED} if early else set())
        return _ends(ends, not late, "the job is stopped")
    if fault.victim is Victim.COORDINATOR and fault.act is Act.TERM:
        return _ends(End.STOPPED, not late and not early, "the job is stopped")
    if not kind.recovers and fault.victim is Victim.RANK:
        certain = fault.act is not Act.PAUSE and fault.moment is Moment.TRAINING
        return _ends(End.FAILED, certain, "the policy allows no recovery: the job fails")
    return _CONTINUES


def _ends(ends: End | set[End], certain: bool, text: str) -> Effect:
    found = frozenset({ends} if isinstance(ends, End) else ends)
    return Effect(found, certain, text if certain else f"{text}, unless it succeeds before")


def steps_lost(trial: Trial) -> int | None:
    """Return the most steps that a trial may lose.

    Only a trial with one fault, which comes in training, has a stated number.
    """
    if len(trial.faults) > 1:
        return None
    kind, [fault] = trial.kind, trial.faults
    if fault.moment not in (Moment.TRAINING, Moment.CHECKPOINT):
        return None
    if fault.victim in (Victim.LAUNCHER, Victim.COORDINATOR) and effect_of(kind, fault).ends:
        return SNAPSHOT_EVERY  # the final checkpoint is the newest snapshot
    if not kind.recovers:
        return SNAPSHOT_EVERY
    if fault.victim is Victim.AGENT:  # a node is lost with its snapshots
        return 0 if kind.copies and kind.nodes > 1 else None
    if fault.victim in (Victim.RANK, Victim.WORKER):
        return 0 if kind.copies else SNAPSHOT_EVERY
    return 0
