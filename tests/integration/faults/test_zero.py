"""ZeroRedundancyOptimizer with DDP: each piece of the optimizer's state is on one rank only.

One job has all faults. The script's scheduler changes the rate every 7 steps, and there are
snapshots every 5 steps.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from training_jobs import RANKS
from training_jobs.ended import EndedOf
from training_jobs.injection import Fault, held
from training_jobs.plans import Attempt, Plan, Row
from training_jobs.record import Record
from training_jobs.rows import RETRY, killed_abreast

pytestmark = pytest.mark.timeout(300)  # the first test waits for the job's end
STEPS = 46
FROM_SNAPSHOTS = {"sources": [{"snapshot": RANKS}], "lost": {3, 4}}
ROWS = (
    killed_abreast("between", 8, 0, others=8, **FROM_SNAPSHOTS),
    killed_abreast("forward", 13, 1, others=13, **FROM_SNAPSHOTS),
    killed_abreast("backward", 18, 2, others=18, **FROM_SNAPSHOTS),
    killed_abreast("updated", 23, 3, others=24, **FROM_SNAPSHOTS),
    killed_abreast("snapshot", 29, 0, others=30, **FROM_SNAPSHOTS | {"lost": 5}),
    # The snapshot includes the rate that the scheduler has set in its step.
    Row(
        "the rate changes at the snapshot",
        38,
        (Fault(1, "forward", 38, life=0),),
        replaced={1},
        **FROM_SNAPSHOTS | {"lost": 3},
    ),
    # A rank without a step could not continue with the others.
    Row(
        "the step is done again",
        42,
        held(Fault(2, "backward", 42, life=0, do="hiccup")),
        lambda job, number: job.release_abreast(number, 42),
        strategies=RETRY,
    ),
)
PLAN = Plan("zero", (Attempt(ROWS),), variant="zero", steps=STEPS, settings={"snapshot_every": 5})


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(row: Row, ended_of: EndedOf) -> None:
    """All ranks return to the snapshots of one step, with the learning rate, in their processes."""
    ended_of(PLAN).check(row)


def test_end(ended_of: EndedOf, baseline_of: Callable[..., Record]) -> None:
    """The job and its learning rate equal the uninterrupted ones, bit by bit."""
    baseline = baseline_of("zero", steps=STEPS)
    assert baseline.result(0)["rate"] == [pytest.approx(1e-2 / 2 ** (STEPS // 7))]
    ended_of(PLAN).check_end(baseline)
