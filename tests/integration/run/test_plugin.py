"""The pytest plugin, as a user's own test would use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import bound_s

from rekindle.errors import JobError
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy
from rekindle.testing.runs import KINDS, JobHandle, Report, Run, RunError

SCRIPT = """
import sys, time
import torch
from rekindle.training.torch import Session, StepSampler

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
data = torch.randn(64, 4)
with Session(model=model, optimizer=optimizer, sampler=StepSampler(64, 8), ddp=True) as session:
    for step in session.steps(int(sys.argv[1])):
        with step:
            loss = session.model(data[step.indices]).square().mean()
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
"""

STEPS = 40


@dataclass(frozen=True)
class Row:
    """One injected kind: its step, the strategy that follows, and whether the rank is replaced."""

    kind: str
    step: int
    strategy: Strategy | None
    replaced: bool = False

    def __str__(self) -> str:
        return self.kind


ROWS = (
    Row("slow", 6, None),
    Row("kill", 12, Strategy.RECOVER_IN_PLACE, replaced=True),
    Row("torn-update", 18, Strategy.RETRY),
    Row("uce", 24, Strategy.RETRY),
    Row("node-lost", 30, Strategy.RECOVER, replaced=True),
)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a training script."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def broken(script: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """Return the report of a run in which rank 1 gets all kinds, and the output of the run."""
    options = {"nproc_per_node": 1, "nnodes": 2}
    run = Run(tmp_path_factory.mktemp("broken") / "run", str(script), [str(STEPS)], options)
    try:
        for row in ROWS:
            run.inject(row.kind, rank=1, step=row.step, seconds=0.2)
        return run.wait(timeout_s=bound_s()), run.output
    finally:
        run.close()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_kind(row: Row, broken: tuple[Report, str]) -> None:
    """A fault that is ordered before the ranks start occurs in its step; no step is lost."""
    report, output = broken
    # An agent that ends prints no further line.
    expected = f"{row.kind} injected into step {row.step} of rank 1"
    assert expected in output or row.kind == "node-lost"
    found = [each for each in report.incidents if each.resumed_at in (row.step, row.step + 1)]
    strategies = [(each.strategy, each.steps_lost) for each in found]
    assert strategies == ([(row.strategy, 0)] if row.strategy else [])


def test_the_report(broken: tuple[Report, str]) -> None:
    """The report has the status, the steps, and the number of processes of each rank."""
    report, output = broken
    assert report.succeeded, output
    assert (report.exit_status, report.outcome, report.finished) == (0, "succeeded", STEPS)
    assert len(report.incidents) == len([row for row in ROWS if row.strategy])
    assert report.processes == {0: 1, 1: 1 + len([row for row in ROWS if row.replaced])}


def test_a_test_looks_on(
    script: Path, rekindle_run: Callable[..., Run], broken: tuple[Report, str]
) -> None:
    """A test waits for steps and events, kills a rank, and reads the job's records."""
    run = rekindle_run(script, str(STEPS), nproc_per_node=1, nnodes=2)
    run.wait_step(3, rank=1)
    before = run.pid(1)
    assert run.status().ranks[1].pid == before
    run.kill(1)
    again = run.wait_event(journal.Restored, 2)
    assert again == run.events_of(journal.Restored)[1]
    assert run.pid(1) != before
    run.wait_until(lambda: run.incidents()[-1].closed, "the end of the incident")
    assert len(run.events_of(journal.RanksStarted, ranks=(1,))) == 2
    report = run.wait(timeout_s=bound_s())
    assert run.has_ended()
    assert run.records() == report.records
    assert [(i.strategy, i.steps_lost) for i in run.incidents()] == [(Strategy.RECOVER_IN_PLACE, 0)]
    # Two runs with different faults have the same training.
    for rank in (0, 1):
        assert report.values("loss", rank) == broken[0].values("loss", rank)
        assert len(report.values("loss", rank)) == STEPS


def test_a_handle_of_any_job(script: Path, rekindle_run: Callable[..., Run]) -> None:
    """`JobHandle` reads a job by its directory; the script's own error ends the job."""
    run = rekindle_run(script, "100000")
    handle = JobHandle(run.directory.path, limit_s=bound_s())
    handle.wait_step(2)
    assert handle.status().job_id == run.status().job_id
    handle.inject("exception")
    ended = handle.wait_event(journal.Ended, outcome="failed")
    assert handle.has_ended()
    assert "an exception was injected" in ended.reason
    with pytest.raises(RunError, match="the job ended before 200000 finished steps of all ranks"):
        handle.wait_step(200000)
    with pytest.raises(RunError, match="the job ended before a process of rank 0"):
        handle.kill(0)
    with pytest.raises(RunError, match=r"not happen within 0 s: nothing[\s\S]*journal[\s\S]*ended"):
        handle.wait_until(lambda: False, "nothing", 0, past_end=True)
    report = run.wait(timeout_s=bound_s())
    assert (report.succeeded, report.exit_status, report.outcome) == (False, 1, "failed")
    assert report.reason == ended.reason


def test_a_handle_without_a_job(tmp_path: Path) -> None:
    """A directory without a job has no events and no coordinator."""
    handle = JobHandle(tmp_path / "none", limit_s=0)
    assert (handle.events(), handle.incidents(), handle.records()) == ([], [], {})
    with pytest.raises(JobError, match="has no coordinator yet"):
        handle.status()
    with pytest.raises(RunError, match="not happen within 0 s: an answer of the job's coordinator"):
        handle.inject("kill")


def test_a_world_that_may_shrink(script: Path, rekindle_run: Callable[..., Run]) -> None:
    """With `--nnodes=min:max` the world continues without the lost node."""
    run = rekindle_run(script, "20", nproc_per_node=1, nnodes="1:2")
    run.inject("node-lost", rank=1, step=10)
    report = run.wait(timeout_s=bound_s())
    assert report.succeeded, run.output
    assert [(i.strategy, i.steps_lost) for i in report.incidents] == [(Strategy.SHRINK, 0)]
    assert "training continues after step 10: 1 rank kept its state" in run.output
    assert report.processes[0] == 1


def test_a_run_that_is_stopped(script: Path, rekindle_run: Callable[..., Run]) -> None:
    """A test can watch and stop a run; an injection into an earlier step is an error."""
    run = rekindle_run(script.name, "100000", working_directory=script.parent)
    run.wait_step(5)
    with pytest.raises(RunError, match="step 2 is over"):
        run.inject("kill", step=2)
    with pytest.raises(RunError, match="not happen within 0 s: the end of the run"):
        run.wait(timeout_s=0)
    run.stop()
    assert run.wait().outcome == "stopped"


def test_a_run_that_does_not_start(rekindle_run: Callable[..., Run]) -> None:
    """The error of a run with a wrong script has the output of the command."""
    run = rekindle_run("no-such-script.py")
    with pytest.raises(RunError, match=r"no-such-script\.py does not exist"):
        run.inject("kill", step=2)
    with pytest.raises(RunError, match=r"ended with status 2, and its journal has no end"):
        run.wait()


def test_the_kinds() -> None:
    """`KINDS` contains the tested kinds."""
    assert {row.kind for row in ROWS} <= set(KINDS)
