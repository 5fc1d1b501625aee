"""What the records of a task cannot tell, and what they tell instead. Pure.

Without its waits in collectives nobody knows a rank's own work, and in synchronous training the
step takes all ranks the same time, whoever is slow.
"""

from __future__ import annotations

import msgspec

from rekindle.profiling.detector import Detector
from rekindle.profiling.finding_text import forward_in_words, nodes_of
from rekindle.profiling.findings import Finding, Slow
from rekindle.profiling.reading import Task
from rekindle.profiling.steps import StepTimes


def seen(task: Task) -> int:
    """Return in how many steps collectives were written down."""
    return sum(
        any(each.waiting or each.links for each in times.values()) for times in task.steps.values()
    )


def slower_forward(task: Task, *, per_node: int = 1) -> list[Finding] | None:
    """Return whose forward pass has become longer, and its peers' has not; None: not recorded.

    Where each rank has the whole model, as in plain DDP, it waits for nobody there.
    """
    detector = Detector(per_node=per_node)
    known = False
    for step, times in task.steps.items():
        if all(each.forward for each in times.values()):
            known = True
            detector.add(step, {rank: _forward_alone(each) for rank, each in times.items()})
    found = detector.findings
    return [each for each in found if each.kind in (Slow.RANK, Slow.NODE)] if known else None


def _forward_alone(times: StepTimes) -> StepTimes:
    """The step as if all but its forward pass were waiting for others."""
    rest = max(times.seconds - times.forward, 0.0)
    plain = {"loading": 0.0, "saving": 0.0, "links": ()}
    return msgspec.structs.replace(times, own=times.forward, waiting=rest, **plain)


def remarks(task: Task, *, per_node: int = 1) -> list[str]:
    """Say what cannot be told of slow ranks, and what of their forward passes; empty: all can."""
    known, steps = seen(task), len(task.steps)
    if known == steps:
        return []
    if known:
        return [
            f"collectives are in the records of {known} of {steps} steps: who is slow in the "
            "others cannot be told by the time of a step"
        ]
    said = [
        "no collectives are in these records: who is slow cannot be told by the time of a step, "
        "in which all wait for the slowest"
    ]
    slower = slower_forward(task, per_node=per_node)
    if slower is not None and len(task.ranks) > 1:
        said += [forward_in_words(each, nodes_of(each, per_node)) for each in slower] or [
            "no rank's forward pass has become longer than its peers'"
        ]
    return said
