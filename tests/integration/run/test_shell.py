"""`rekindle profile`, `diagnose` and `inject`, from the command line, on running jobs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from jobs import Place, Run
from jobs.scripts import TRAINS
from waiting import run_command

from rekindle.profiling.files import lines_of, rank_folders
from rekindle.profiling.markers import ranges
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

SLOW = """
import os, time, torch
from rekindle.training.torch import Session

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(70):
        while step.number == 3 and not os.path.exists("go"):
            time.sleep(0.01)
        with step:
            time.sleep(0.12 if session.rank == 1 and step.number >= 40 else 0.02)
            loss = session.model(torch.ones(2, 4)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("step", step.number, flush=True)
"""


def rekindle(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rekindle.cli.main", *arguments]
    return run_command(command, env=place.environment())


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run a job without --allow-injection that waits in step 3; rank 1 is slow after step 39."""
    with Place(tmp_path_factory.mktemp("slow") / "place") as place:
        run = place.start("--nproc-per-node", "2", place.script(SLOW))
        run.wait_for_output(1, "step 2")
        yield run


@pytest.fixture(scope="module")
def refused(slow: Run) -> dict[str, subprocess.CompletedProcess[str]]:
    """Return the commands that the running job refuses."""
    return {
        "profile": rekindle(slow.place, "profile", "job", "on", "--kinds", "kernels"),
        "inject": rekindle(slow.place, "inject", "job", "--rank", "1", "--kind", "kill"),
    }


@pytest.fixture(scope="module")
def profiled(slow: Run, refused: object) -> Run:
    """Return the ended job with records of all steps after step 2."""
    done = rekindle(slow.place, "profile", "job", "on", "--kinds", "step,communication")
    assert (done.returncode, done.stderr) == (0, "")
    (slow.place.folder / "go").touch()
    return slow.end(0)


@pytest.mark.parametrize(
    ("command", "words"),
    [("profile", "kernels is not a kind of record"), ("inject", "start it with --allow-injection")],
)
def test_what_a_running_job_does_not_do(
    refused: dict[str, subprocess.CompletedProcess[str]], command: str, words: str
) -> None:
    """The command's error has the reason, and the job continues."""
    assert refused[command].returncode == 1
    assert words in refused[command].stderr


def test_records_of_a_running_job(profiled: Run) -> None:
    """Each rank has records of all its steps, of the requested kinds."""
    (event,) = profiled.events_of(journal.Profiled)
    assert "record communication, step" in event.in_words()
    (task,) = (profiled.directory.path / "profiling").iterdir()
    steps = {
        rank: [each.step for each in ranges(lines_of(folder)) if each.step >= 0]
        for rank, folder in rank_folders(task).items()
    }
    assert steps == {rank: list(range(3, 70)) for rank in (0, 1)}
    late = rekindle(profiled.place, "profile", "job", "off")
    assert late.returncode == 1
    assert "does not run" in late.stderr
    assert not journal.incidents(profiled.events())


def test_who_is_slow_is_named(profiled: Run) -> None:
    """`diagnose` names the slow rank, from the job and from a copy of its records."""
    place = profiled.place
    copy = place.folder / "copy"
    shutil.copytree(profiled.directory.path / "profiling", copy)
    trace, picture = place.folder / "trace.json", place.folder / "map.png"
    for where in ("job", str(copy)):
        more = ("--steps", "35:45", "--trace", str(trace), "--picture", str(picture))
        done = rekindle(place, "diagnose", where, *more)
        assert done.returncode == 0, done.stderr
        assert "slow-rank: rank 1 (node " in done.stdout
        assert done.stdout.count("slow-rank") == 1
        assert "node check" in done.stdout
    events = json.loads(trace.read_bytes())["traceEvents"]
    assert {each["pid"] for each in events} == {0, 1}
    steps = {each["name"] for each in events if each["name"].startswith("step")}
    assert steps == {f"step {number}" for number in range(35, 46)}
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(rekindle(place, "diagnose", "job", "--json").stdout)
    (now,) = found["now"]
    assert (now["kind"], now["ranks"], abs(now["since"] - 40) <= 2) == ("slow-rank", [1], True)
    assert now["factor"] > 3


def test_a_rank_is_killed_in_a_later_step(place: Place) -> None:
    """The job recovers from `rekindle inject`, and its output names the injected fault."""
    run = place.start("--nproc-per-node", "2", "--allow-injection", place.script(TRAINS))
    run.wait_for_output(1, "step 2")
    done = rekindle(place, "inject", "job", "--rank", "1", "--step", "5", "--kind", "kill")
    assert (done.returncode, done.stderr) == (0, "")
    (place.folder / "go").touch()
    run.end(0)
    (incident,) = journal.incidents(run.events())
    assert (incident.strategy, incident.cause.finished) == (Strategy.RECOVER_IN_PLACE, 5)
    assert "kill injected into step 5 of rank 1" in run.stderr
