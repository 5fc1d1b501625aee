"""`rekindle profile`: switch light profiling from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from jobs import Place
from jobs.scripts import TRAINS

from rekindle.profiling.files import lines_of, rank_folders
from rekindle.profiling.markers import ranges
from rekindle.recovery import journal

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


def profile(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return rekindle(place, "profile", *arguments)


def rekindle(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli", *arguments],
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


def test_who_is_slow_is_named(place: Place) -> None:
    """While it trains or later, here or from a copy of the records elsewhere."""
    run = place.start("--nproc-per-node", "2", place.script(SLOW))
    run.wait_for_output(1, "step 2")
    assert profile(place, "job", "on", "--kinds", "communication").returncode == 0
    (place.folder / "go").touch()
    run.end(0)
    copy = place.folder / "copy"
    shutil.copytree(run.directory.path / "profiling", copy)
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


def test_what_cannot_be_diagnosed(place: Place) -> None:
    (place.folder / "empty").mkdir()
    for words, wrong in (
        ([str(place.folder / "empty")], "holds no records"),
        (["nothing"], "neither a job on this machine nor a folder"),
        ([str(place.folder / "none")], "neither a job on this machine nor a folder"),
    ):
        done = rekindle(place, "diagnose", *words)
        assert (done.returncode, wrong in done.stderr) == (2, True), done.stderr
