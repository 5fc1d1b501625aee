"""A rank that survives the faults of its peers does not grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from training_jobs import dying
from training_jobs.job import Job

from rekindle.recovery.policy.policy import Policy

RANKS = 2
STEPS = 600  # more than RECOVERIES, because some processes of the last rank finish two steps
RECOVERIES = 500
EARLY = slice(50, 150)  # generations after which all caches exist
LATE = slice(-100, None)
MORE_BYTES = 20 << 20  # in all later recoveries: less than 60 KB for each
LIMIT_S = 2400


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S + 600)
def test_five_hundred_recoveries_do_not_let_a_survivor_grow(job: Callable[..., Job]) -> None:
    """500 peers die in collectives of a rank: it keeps no thread, socket or memory of them."""
    run = job(
        processes=RANKS,
        steps=STEPS,
        snapshot_every=STEPS,
        policy=Policy(max_recoveries=STEPS, max_restarts=0),
        script=Path(dying.__file__),
    )
    assert run.end(LIMIT_S).outcome == "succeeded", run.story()
    lines = run.record.lines(0)
    assert len({line["metrics"]["pid"] for line in lines}) == 1
    held = {line["generation"]: line["metrics"] for line in reversed(lines)}
    series = [held[generation] for generation in sorted(held)]
    assert len(series) > RECOVERIES
    for name, more in (("threads", 0), ("descriptors", 0), ("bytes", MORE_BYTES)):
        values = [each[name] for each in series]
        early, late = median(values[EARLY]), median(values[LATE])
        print(f"{name}: {early} early, {late} after {len(series) - 1} recoveries")
        assert late <= early + more, name
