"""`rekindle inject`: break a running job from the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from jobs import Place
from jobs.scripts import TRAINS

from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy


def inject(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli", "inject", *arguments],
        env=place.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_rank_is_killed_in_a_later_step(place: Place) -> None:
    """The job recovers from it, and says what happened."""
    run = place.start("--nproc-per-node", "2", "--allow-injection", place.script(TRAINS))
    run.wait_for_output(1, "step 2")
    done = inject(place, "job", "--rank", "1", "--step", "5", "--kind", "kill")
    assert (done.returncode, done.stderr) == (0, "")
    (place.folder / "go").touch()
    run.end(0)
    (incident,) = journal.incidents(run.events())
    assert (incident.strategy, incident.cause.finished) == (Strategy.RECOVER_IN_PLACE, 5)
    assert "kill injected into step 5 of rank 1" in run.stderr


def test_a_job_that_does_not_allow_it(place: Place) -> None:
    """It is told how to, and goes on."""
    run = place.start("--nproc-per-node", "2", place.script(TRAINS))
    run.wait_for_output(1, "step 2")
    done = inject(place, "job", "--rank", "1", "--kind", "kill")
    assert done.returncode == 1
    assert "start it with --allow-injection" in done.stderr
    (place.folder / "go").touch()
    run.end(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--rank", "0", "--kind", "kill"], "there is no job 'nowhere'"),
        (["job", "--rank", "0", "--kind", "flood"], "invalid choice: 'flood'"),
        (["job", "--rank", "0", "--kind", "kill", "--step", "-3"], "counted from 0"),
        (["job", "--rank", "0", "--kind", "slow", "--seconds", "nan"], "give seconds"),
    ],
)
def test_what_cannot_be_meant(arguments: list[str], words: str, place: Place) -> None:
    """A usage error, and nothing is sent."""
    done = inject(place, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
