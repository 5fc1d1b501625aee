"""The findings of a detector in simulated steps with noise of known size."""

from __future__ import annotations

import random
from collections.abc import Callable

from rekindle.profiling.detector import Detector
from rekindle.profiling.findings import Finding
from rekindle.profiling.steps import StepTimes

ONSET, STEPS, WITHIN = 35, 60, 20
NOISE = 0.02
Work = Callable[[int, int], float]  # the work of a rank in a step, as a multiple of the usual work


def watch(
    ranks: int,
    work: Work = lambda rank, step: 1.0,
    *,
    loading: Work = lambda rank, step: 0.01,
    saving: Work = lambda rank, step: 0.0,
    recorded: Callable[[int], bool] = lambda step: True,
    transfer: Callable[[str, int], float] = lambda group, step: 0.0,
    groups: dict[str, list[int]] | None = None,
    detector: Detector | None = None,
    steps: int = STEPS,
    seed: int = 5,
) -> tuple[list[Finding], Detector]:
    """Return all findings, and the detector."""
    chance = random.Random(seed)
    detector = detector or Detector()
    found = []
    for step in range(steps):
        all_ = 0.1 * chance.lognormvariate(0, 0.2)  # a longer batch takes longer on all ranks
        own = {r: all_ * work(r, step) * chance.lognormvariate(0, NOISE) for r in range(ranks)}
        waited = {r: 0.1 * loading(r, step) for r in range(ranks)}
        total = max(own[r] + waited[r] for r in range(ranks))
        took = {
            name: 0.1 * transfer(name, step) * chance.lognormvariate(0, NOISE)
            for name in groups or {}
        }
        links = {
            # Each rank waits for the last rank of the group.
            r: tuple(
                (name, (took[name] + max(own[other] for other in members) - own[r],))
                for name, members in (groups or {}).items()
                if r in members
            )
            for r in range(ranks)
        }
        total += max(took.values(), default=0.0)
        times = {}
        for r in range(ranks):
            busy = own[r] + waited[r] if recorded(step) else total
            times[r] = StepTimes(
                step=step,
                start=0,
                seconds=total,
                own=busy,
                waiting=total - busy,
                loading=waited[r],
                saving=0.1 * saving(r, step),
                links=links[r],
            )
        found += detector.add(step, times)
    return found, detector


def from_onset(factor: float, *slow: int, usual: float = 1.0) -> Work:
    return lambda rank, step: usual * (factor if rank in slow and step >= ONSET else 1.0)
