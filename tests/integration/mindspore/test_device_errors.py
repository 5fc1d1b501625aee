"""The errors that MindSpore raises for a device or a link, as they leave its train network.

One job has all errors. The last one leaves collectives open, so all ranks get new processes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from mindspore_jobs.baselines import Baseline
from mindspore_jobs.job import STEPS, MindSporeJob, assert_same, needs_mindspore
from mindspore_jobs.rows import Ended, Row, meet

from rekindle.recovery.policy.policy import Strategy

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
RANKS = 3
UCE = "UCEError error occurs when execute, error_code=507053"
# The text, the place and the final strategy of each error.
ERRORS = [
    (UCE, "graph", Strategy.RETRY),
    ("HCCEError error occurs when execute", "graph", Strategy.RETRY),
    (UCE, "behind", Strategy.RETRY),
    ("SuspectRemoteError error occurs when execute", "behind", Strategy.RETRY),
    ("ForceStopError error occurs when execute", "graph", Strategy.RETRY),
    (UCE, "before", Strategy.RESTART),
]


def drawn(seed: int) -> list[tuple[Row, str]]:
    """Return the rows of all errors, at random steps of random ranks, and the script's options."""
    chance = random.Random(seed)
    # An incident is closed by the next step. So there is at least one step between two errors.
    gaps = sorted(chance.sample(range(2, STEPS - 1 - 2 * len(ERRORS)), len(ERRORS)))
    steps = [gap + 2 * number for number, gap in enumerate(gaps)]
    found = []
    for step, (text, place, strategy) in zip(steps, ERRORS, strict=True):
        rank = chance.randrange(RANKS)
        name = f"{text.split()[0]} {place} the graph of rank {rank} in step {step}"
        row = Row(name, step, strategy=strategy, first=Strategy.RETRY, message=text.split()[0])
        found.append((row, f"{rank}:{step}:{place}:{text}"))
    return found


DRAWN = drawn(seed=3)
ROWS = [row for row, _ in DRAWN]


def train(folder: Path, errors: list[tuple[Row, str]]) -> Ended:
    """Return a job after all errors."""
    script = [word for _, option in errors for word in ("--error", option)]
    job = MindSporeJob(folder, *script, ranks=RANKS, options=("--max-restarts", "1"))
    return meet(job, [row for row, _ in errors])


def check_training(ended: Ended, errors: list[tuple[Row, str]], baseline: Baseline) -> None:
    """Check that the training equals an undisturbed run."""
    ended.check_end()
    lost = dict.fromkeys(range(RANKS), 0)
    for _, option in errors:
        lost[int(option[0])] += 1
    assert_same(ended.job, baseline(RANKS), unwritten=lost)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return the job after all errors."""
    return train(tmp_path_factory.mktemp("job"), DRAWN)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_error_costs_no_process_and_no_step(ended: Ended, row: Row) -> None:
    """All processes stay, unless a collective is open."""
    ended.check(row)


def test_the_training_is_that_of_an_undisturbed_run(ended: Ended, baseline: Baseline) -> None:
    """A rank does not get the loss of a step that raised an error."""
    check_training(ended, DRAWN, baseline)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4, 14))
def test_errors_at_other_steps(tmp_path: Path, baseline: Baseline, seed: int) -> None:
    """Other steps and ranks give the same results."""
    errors = drawn(seed)
    ended = train(tmp_path, errors)
    for row, _ in errors:
        ended.check(row)
    check_training(ended, errors, baseline)
