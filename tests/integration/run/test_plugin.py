"""The pytest plugin, used as a user's own test would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import bound_s

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
STEPS = 40

# What each kind strikes, in the order of a run that meets all of them, and how it is met.
MET = {
    "kill": (1, 10, Strategy.RECOVER_IN_PLACE),
    "slow": (0, 15, None),
    "torn-update": (1, 20, Strategy.RETRY),
    "uce": (0, 25, Strategy.RETRY),
    "node-lost": (1, 30, Strategy.RECOVER),
}
PROCESSES = {0: 1, 1: 3}  # a kill and a lost node of rank 1

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training script."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def stopped(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A run that nothing disturbs, until it is stopped after more steps than the others have.

    What cannot be injected any more is refused.
    """
    options = {"nproc_per_node": 2, "working_directory": script.parent}
    folder = tmp_path_factory.mktemp("stopped") / "run"
    run = Run(folder, script.name, ["100000"], options)
    try:
        run.wait_step(STEPS, timeout_s=bound_s())
        with pytest.raises(RunError, match="step 2 is past"):
            run.inject("kill", step=2)
        with pytest.raises(RunError, match="the run has not ended within"):
            run.wait(timeout_s=0.1)
        run.stop()
        return run.wait(timeout_s=bound_s())
    finally:
        run.close()


@pytest.fixture(scope="module")
def met(script: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """A run of two nodes with a fault of each kind, all ordered before the ranks have begun."""
    options = {"nproc_per_node": 1, "nnodes": 2}
    run = Run(tmp_path_factory.mktemp("met") / "run", str(script), [str(STEPS)], options)
    try:
        for kind, (rank, step, _) in MET.items():
            run.inject(kind, rank=rank, step=step, seconds=0.2, timeout_s=bound_s())
        return run.wait(timeout_s=bound_s()), run.output
    finally:
        run.close()


def test_a_run_that_is_stopped(stopped: Report) -> None:
    """A test may look on, and stop a run."""
    assert stopped.outcome == "stopped"


@pytest.mark.parametrize("kind", MET)
def test_a_kind(kind: str, met: tuple[Report, str]) -> None:
    """A fault strikes in its step, and costs no step."""
    report, output = met
    rank, step, strategy = MET[kind]
    # What a node's agent was about to print dies with it.
    assert kind == "node-lost" or f"{kind} injected into step {step} of rank {rank}" in output
    hit = [i for i in report.incidents if i.resumed_at in (step, step + 1)]
    assert [(i.strategy, i.steps_lost) for i in hit] == ([(strategy, 0)] if strategy else [])


def test_a_run_with_faults_ends_as_one_without(met: tuple[Report, str], stopped: Report) -> None:
    """All losses are those of the undisturbed run, bit by bit."""
    report, output = met
    assert report.succeeded, output
    assert (report.exit_status, report.processes) == (0, PROCESSES)
    assert len(report.incidents) == sum(strategy is not None for *_, strategy in MET.values())
    for rank in (0, 1):
        assert report.values("loss", rank) == stopped.values("loss", rank)[:STEPS]
        assert len(report.values("loss", rank)) == report.finished == STEPS


def test_a_world_that_may_shrink(script: Path, rekindle_run: Start) -> None:
    """`--nnodes=min:max` on the command line: training continues without the lost node."""
    run = rekindle_run(script, "20", nproc_per_node=1, nnodes="1:2")
    run.inject("node-lost", rank=1, step=10, timeout_s=bound_s())
    report = run.wait(timeout_s=bound_s())
    assert report.succeeded, run.output
    assert [(i.strategy, i.steps_lost) for i in report.incidents] == [(Strategy.SHRINK, 0)]
    assert "generation 2 goes on after step 10 (1 x self)" in run.output
    assert report.processes[0] == 1


def test_an_error_of_the_script(script: Path, rekindle_run: Start) -> None:
    """What no recovery can help with ends the run, and the report has the reason."""
    run = rekindle_run(script, "20")
    run.inject("exception", step=3, timeout_s=bound_s())
    report: Report = run.wait(timeout_s=bound_s())
    assert (report.succeeded, report.exit_status, report.outcome) == (False, 1, "failed")
    assert "an exception was injected" in report.reason


def test_a_run_that_does_not_start(rekindle_run: Start) -> None:
    """The error for a wrong script has what the command has printed."""
    run = rekindle_run("no-such-script.py")
    with pytest.raises(RunError, match=r"no-such-script\.py does not exist"):
        run.inject("kill", step=2)
    with pytest.raises(RunError, match=r"ended with status 2, and no word"):
        run.wait(timeout_s=bound_s())


def test_the_kinds() -> None:
    """All that `rekindle inject` knows."""
    assert set(MET) <= set(KINDS)
