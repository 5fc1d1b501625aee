"""Random faults in jobs of all kinds, see `campaign`.

REKINDLE_TEST_TRIALS is the number of trials, and REKINDLE_TEST_FIRST_TRIAL the first seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign.running import run_trial
from campaign.shared import SharedParts
from campaign.trials import trial_of

TRIALS = int(os.environ.get("REKINDLE_TEST_TRIALS", "60"))
FIRST = int(os.environ.get("REKINDLE_TEST_FIRST_TRIAL", "0"))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedParts]:
    """Return undisturbed jobs and servers for all trials."""
    with SharedParts(tmp_path_factory.mktemp("campaign")) as parts:
        yield parts


@pytest.mark.parametrize("seed", range(FIRST, FIRST + TRIALS))
def test_trial(seed: int, shared: SharedParts, tmp_path: Path) -> None:
    """No job is lost that its policy allows to continue, no digest is wrong, nothing is left."""
    result = run_trial(trial_of(seed), tmp_path / "trial", shared)
    command = f"PYTHONPATH=tests/support .venv/bin/python -m campaign --seed {seed}"
    assert not result.problems, f"\n{result.trial}\n{result}\n  replay: {command}\n{result.story}"
