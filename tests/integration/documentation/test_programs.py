"""The complete programs of the pages run, and recover from the fault that the page names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from documented_blocks import HOW, new_side, old_side, program
from mindspore_jobs.job import MindSporeJob, needs_mindspore
from repository import ROOT
from waiting import bound_s, run_command

from rekindle.protocol.agent import InjectionKind
from rekindle.recovery.policy.policy import Strategy
from rekindle.testing.runs import Run

_TRAINS = """
import sys
import time
import torch
from rekindle.training.torch import Session, StepSampler

steps = int(sys.argv[1].partition("=")[2])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 4)
with Session(model=model, optimizer=optimizer, sampler=StepSampler(64, 8), ddp=True) as session:
    for step in session.steps(steps):
        with step:
            loss = session.model(data[step.indices]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
            time.sleep(0.2)  # the job still runs when the test kills a rank
"""


def places(how: str) -> list[tuple[str, int]]:
    return [place for place, found in HOW.items() if found == how]


@pytest.mark.parametrize("place", places("kill a rank"), ids=str)
def test_a_rank_is_killed(place: tuple[str, int], tmp_path: Path) -> None:
    """After a kill of rank 1 only rank 1 restarts, and no step is lost."""
    script = tmp_path / "train.py"
    script.write_text(program(*place))
    options = {"nproc_per_node": 2, "working_directory": tmp_path}
    run = Run(tmp_path / "run", str(script), [], options)
    try:
        run.inject("kill", rank=1, step=20)
        report = run.wait(timeout_s=bound_s())
    finally:
        run.close()
    assert report.succeeded, run.output
    [incident] = report.incidents
    assert (incident.strategies, incident.steps_lost) == ([Strategy.RECOVER_IN_PLACE], 0)
    assert report.processes == {0: 1, 1: 2}


def test_few_lines_change() -> None:
    """A script with epochs needs at most ten changed lines."""
    page = (ROOT / "docs" / "start" / "first-recovery.md").read_text()
    [diff] = re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    added, removed = (sum(line[:1] == sign for line in diff.splitlines()) for sign in "+-")
    assert removed <= added <= 10
    assert f"a scheduler: {added} lines" in page


def test_the_script_before_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun runs the script that the page changes. Both scripts print the same epochs."""
    page = (ROOT / "docs" / "start" / "first-recovery.md").read_text()
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    [diff] = re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    epochs = []
    for name, text in (("old.py", old_side(diff)), ("new.py", new_side(diff))):
        script = tmp_path / name
        script.write_text(text)
        launcher = ["torch.distributed.run"] if name == "old.py" else ["rekindle.cli.main", "run"]
        command = [sys.executable, "-m", *launcher, "--nproc-per-node", "2", str(script)]
        done = run_command(command, 4 * bound_s(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        epochs.append(re.findall(r"epoch \d", done.stdout + done.stderr))
        assert (tmp_path / "model.pt").exists()
        (tmp_path / "model.pt").unlink()
    assert epochs[0] == epochs[1]
    assert len(epochs[0]) == 5


@pytest.mark.parametrize("place", places("pytest"), ids=str)
def test_a_test_of_a_page(place: tuple[str, int], tmp_path: Path) -> None:
    """A test on a page passes with the plugin of the package."""
    (tmp_path / "train.py").write_text(_TRAINS)
    # The other kinds are in tests/integration/run/test_plugin.py.
    text = re.sub(r"^KINDS = .*$", 'KINDS = ["kill"]', program(*place), flags=re.MULTILINE)
    (tmp_path / "test_faults.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_faults.py"]
    done = run_command(command, 4 * bound_s(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout


@needs_mindspore
@pytest.mark.timeout(400)
@pytest.mark.parametrize("place", places("kill a rank of MindSpore"), ids=str)
def test_a_rank_of_mindspore_is_killed(place: tuple[str, int], tmp_path: Path) -> None:
    """All ranks restart, and continue after the step of the fault."""
    script = tmp_path / "train.py"
    script.write_text(program(*place))
    with MindSporeJob(tmp_path, options=("--max-restarts", "1"), program=script) as job:
        job.inject(0, InjectionKind.KILL, 60)
        assert job.end() == 0, job.story()
    [incident] = job.incidents()
    assert (incident.strategies, incident.steps_lost) == ([Strategy.RESTART], 0), job.story()


@pytest.mark.parametrize("place", places("python"), ids=str)
def test_a_program_that_launches_a_job(
    place: tuple[str, int], tmp_path: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow that a program calls from Python succeeds, in the folder of the repository."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
    done = run_command([sys.executable, "-c", program(*place)], 4 * bound_s(), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
