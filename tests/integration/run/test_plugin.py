"""The pytest plugin, used as a user's own test would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs.selection import soak_but

from rekindle.recovery.policy import Strategy
from rekindle.testing.runs import KINDS, Report, Run, RunError

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

# What each kind costs in processes of the rank that it hits, and how it is met.
MET = {
    "kill": (2, Strategy.RECOVER_IN_PLACE),
    "node-lost": (2, Strategy.RECOVER),
    "slow": (1, None),
    "uce": (1, Strategy.RETRY),
    "torn-update": (1, Strategy.RETRY),
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def losses() -> dict[int, list[float]]:
    """The losses of the first run by rank; all others must have the same."""
    return {}


@pytest.mark.parametrize("kind", soak_but(MET, "kill", "slow", "torn-update"))
def test_a_kind(
    kind: str,
    script: Path,
    rekindle_run: Callable[..., Run],
    losses: dict[int, list[float]],
) -> None:
    """A fault ordered before the ranks have begun strikes in its step, and costs no step."""
    run = rekindle_run(script, "20", nproc_per_node=1, nnodes=2)
    run.inject(kind, rank=1, step=10, seconds=0.2)
    report = run.wait()
    assert report.succeeded, run.output
    # What a node's agent was about to print dies with it.
    assert kind == "node-lost" or f"{kind} injected into step 10 of rank 1" in run.output
    processes, strategy = MET[kind]
    assert (report.exit_status, report.processes) == (0, {0: 1, 1: processes})
    assert [(i.strategy, i.steps_lost) for i in report.incidents] == (
        [(strategy, 0)] if strategy else []
    )
    assert {i.resumed_at for i in report.incidents} <= {10, 11}
    found = {rank: report.values("loss", rank) for rank in (0, 1)}
    assert found == (losses or found)
    assert len(found[0]) == report.finished == 20
    losses |= found


def test_a_world_that_may_shrink(script: Path, rekindle_run: Callable[..., Run]) -> None:
    """`--nnodes=min:max` on the command line: the world goes on without the lost node."""
    run = rekindle_run(script, "20", nproc_per_node=1, nnodes="1:2")
    run.inject("node-lost", rank=1, step=10)
    report = run.wait()
    assert report.succeeded, run.output
    assert [(i.strategy, i.steps_lost) for i in report.incidents] == [(Strategy.SHRINK, 0)]
    assert "generation 2 goes on after step 10 (1 x self)" in run.output
    assert report.processes[0] == 1


def test_an_error_of_the_script(script: Path, rekindle_run: Callable[..., Run]) -> None:
    """What no recovery can help with ends the run, and the report says so."""
    run = rekindle_run(script, "20")
    run.inject("exception", step=3)
    report: Report = run.wait()
    assert (report.succeeded, report.exit_status, report.outcome) == (False, 1, "failed")
    assert "an exception was injected" in report.reason


def test_a_run_that_is_stopped(script: Path, rekindle_run: Callable[..., Run]) -> None:
    """A test may look on, and stop a run; what cannot be injected any more is refused."""
    run = rekindle_run(script.name, "100000", working_directory=script.parent)
    run.wait_step(5)
    with pytest.raises(RunError, match="step 2 is past"):
        run.inject("kill", step=2)
    with pytest.raises(RunError, match="the run has not ended within"):
        run.wait(timeout_s=0.1)
    run.stop()
    assert run.wait().outcome == "stopped"


def test_a_run_that_does_not_start(rekindle_run: Callable[..., Run]) -> None:
    """A wrong script is told of with what the command has printed."""
    run = rekindle_run("no-such-script.py")
    with pytest.raises(RunError, match=r"no-such-script\.py does not exist"):
        run.inject("kill", step=2)
    with pytest.raises(RunError, match=r"ended with status 2, and no word"):
        run.wait()


def test_the_kinds() -> None:
    """All that `rekindle inject` knows."""
    assert set(MET) <= set(KINDS)
