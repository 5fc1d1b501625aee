"""The trial of a seed."""

from __future__ import annotations

import dataclasses
import random

from campaign.faults import RECOVERY_EVENTS, Act, Fault, Moment, Victim
from campaign.kinds import KINDS, STEPS, Kind

COUNTS = (1, 1, 1, 2, 2, 3)  # faults of a trial, each with the same probability
LAST_STEP = STEPS - 8  # the last step after which a fault in training begins
PAUSES_S = (0.5, 3.0, 8.0, 25.0)
_STEERS = (Victim.LAUNCHER, Victim.FLOW)
_DELAYS_S = {
    Moment.LAUNCH: 2.0,
    Moment.START: 0.6,
    Moment.TRAINING: 0.1,
    Moment.RECOVERY: 0.5,
    Moment.CHECKPOINT: 0.05,
    Moment.END: 0.5,
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A job and its faults, in the order in which they happen."""

    seed: int
    kind: Kind
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        lines = [f"trial {self.seed}: a job of the kind '{self.kind.name}'"]
        return "\n".join([*lines, *(f"  fault: {fault}" for fault in self.faults)])


def trial_of(seed: int) -> Trial:
    """Return the trial of a seed; the same seed always gives the same trial."""
    chance = random.Random(f"campaign {seed}")
    kind = chance.choice(KINDS)
    count = chance.choice(COUNTS)
    steps = sorted(chance.sample(range(1, LAST_STEP), count))
    faults = [_fault(chance, kind, step) for step in steps]
    order = list(Moment)
    in_training = order.index(Moment.TRAINING)
    # Faults of the start come first, faults of the end last.
    rank = {Moment.LAUNCH: 0, Moment.START: 1, Moment.END: len(order)}
    faults.sort(key=lambda fault: (rank.get(fault.moment, in_training), fault.step))
    # A launcher that stays stopped starts nothing that a later fault needs.
    faults.sort(key=lambda fault: fault.act is Act.STOP and fault.victim in _STEERS)
    return Trial(seed, kind, tuple(faults))


def _fault(chance: random.Random, kind: Kind, step: int) -> Fault:
    victim = chance.choice(kind.victims())
    moment = chance.choice(kind.moments(victim))
    act = chance.choice(list(Act))
    return Fault(
        victim=victim,
        act=act,
        moment=moment,
        step=step,
        delay_s=chance.uniform(0, _DELAYS_S[moment]),
        number=chance.randrange(kind.world_size),
        killed=chance.randrange(kind.world_size),
        event=chance.choice(RECOVERY_EVENTS),
        paused_s=chance.choice(PAUSES_S) if act is Act.PAUSE else 0.0,
    )
