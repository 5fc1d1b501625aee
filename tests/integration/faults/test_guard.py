"""Ranks that skip bad batches together, also in the middle of other faults."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from waiting import run_command

from rekindle import names
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.policy import Strategy
from rekindle.testing.handle import JobHandle

SCRIPT = """
import os, signal, sys
import torch
from rekindle.training.torch import Guard, Session, StepSampler

dies = {int(each): int(rank) for each, rank in (pair.split(":") for pair in sys.argv[1:])}
torch.manual_seed(0)
inputs = torch.randn(256, 4)
inputs[100] = float("nan")  # a broken sample: one rank has it
model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = StepSampler(256, 4, shuffle=False)
guard = Guard(spike=20.0)
objects = {"model": model, "optimizer": optimizer, "sampler": sampler, "guard": guard}
with Session(**objects, ddp={"broadcast_buffers": False}) as session:
    def die(step, place):
        if dies.get(10 * step + place) == session.rank and os.environ["MA_PROC_START_CNT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    for step in session.steps(36):
        with step:
            die(step.number, 0)
            scale = 1e4 if step.number == 30 else 1.0  # a spike
            loss = (session.model(inputs[step.indices]) - 1).square().mean() * scale
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            die(step.number, 1)
            optimizer.step()
if session.rank == 0:
    print("sum", *(each.double().sum().item() for each in model.parameters()), flush=True)
"""


def run(folder: Path, job: str, *dies: str) -> tuple[JobHandle, str]:
    """Run the job; return it, and its result."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "rekindle.cli.main", "run", "--log-format", "short"]
    command += ["--job-id", job, "--nproc-per-node", "2", "train.py", *dies]
    home = {names.ENV_HOME: str(folder / "home")}
    done = run_command(command, cwd=folder, env={**os.environ, **home})
    assert done.returncode == 0, done.stderr
    [result] = [line for line in done.stdout.splitlines() if "sum" in line]
    return JobHandle(folder / "home" / "jobs" / job), result


def test_bad_batches_are_skipped_exactly(tmp_path: Path) -> None:
    """A broken sample and a spike are an incident each. Killed ranks change no bit of the result.

    A rank dies in each of the two steps, and a new process knows the earlier losses.
    """
    plain, expected = run(tmp_path, "plain")
    faulty, result = run(tmp_path, "faulty", "121:1", "200:0", "300:1")
    assert "nan" not in expected
    assert result == expected
    for job in (plain, faulty):
        skipped = [each for each in job.incidents() if each.cause.kind is FaultKind.SKIPPED_STEP]
        assert [each.cause.finished for each in skipped] == [12, 30]
        assert skipped[0].reason == (
            "all ranks skip step 12: a gradient is not finite; training continues"
        )
        assert "all ranks skip step 30: loss is" in skipped[1].reason
        assert all(each.closed and each.steps_lost == 0 for each in skipped)
    assert not [each for each in plain.incidents() if each.strategy is not None]
    others = [each for each in faulty.incidents() if each.strategy is not None]
    assert [each.strategy for each in others] == [Strategy.RECOVER_IN_PLACE] * len(others)
    assert len(others) >= 2
