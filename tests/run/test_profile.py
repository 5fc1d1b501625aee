"""`rekindle profile`: switch light profiling from the command line."""

from __future__ import annotations

import subprocess
import sys

from jobs import Place
from run.test_inject import TRAINS

from rekindle.profiling.files import lines_of, rank_folders
from rekindle.profiling.markers import ranges
from rekindle.recovery import journal


def profile(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli", "profile", *arguments],
        env=place.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_records_of_a_running_job(place: Place) -> None:
    run = place.start("--nproc-per-node", "2", place.script(TRAINS))
    run.wait_for_output(1, "step 2")
    refused = profile(place, "job", "on", "--kinds", "kernels")
    assert refused.returncode == 1
    assert "kernels: no such trace" in refused.stderr
    done = profile(place, "job", "on", "--kinds", "step,communication")
    assert (done.returncode, done.stderr) == (0, "")
    (place.folder / "go").touch()
    run.end(0)
    (event,) = run.recorded(journal.Profiled)
    assert "write down communication, step" in event.in_words()
    (task,) = (run.directory.path / "profiling").iterdir()
    steps = {
        rank: [each.step for each in ranges(lines_of(folder)) if each.step >= 0]
        for rank, folder in rank_folders(task).items()
    }
    assert steps == {0: [3, 4, 5, 6, 7], 1: [3, 4, 5, 6, 7]}
    late = profile(place, "job", "off")
    assert late.returncode == 1
    assert "does not run" in late.stderr
