"""A rank that dies while the others wait for it in a collective between two steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from waiting import run_command

from rekindle import names
from rekindle.testing.handle import JobHandle

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from rekindle.training.torch import Session, StepSampler

torch.manual_seed(0)
data = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = StepSampler(64, 4)
with Session(model=model, optimizer=optimizer, sampler=sampler, ddp=True) as session:
    for step in session.steps(20):
        if step.number == 17 and session.rank == int(sys.argv[1]) and session.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        with step:
            loss = session.model(data[step.indices]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
if session.rank == 0:
    print("sum", sum(each.double().sum().item() for each in model.parameters()), flush=True)
"""


def test_a_collective_between_two_steps(tmp_path: Path) -> None:
    """All ranks return to the newest snapshot, not to the beginning, and no bit changes."""
    (tmp_path / "train.py").write_text(SCRIPT)
    results = set()
    for job, rank in (("plain", -1), ("killed", 1)):
        command = [sys.executable, "-m", "rekindle.cli.main", "run", "--log-format", "short"]
        command += ["--job-id", job, "--nproc-per-node", "2", "train.py", str(rank)]
        home = {names.ENV_HOME: str(tmp_path / "home")}
        done = run_command(command, cwd=tmp_path, env={**os.environ, **home})
        assert done.returncode == 0, done.stderr
        results |= {line for line in done.stdout.splitlines() if "sum" in line}
    assert len(results) == 1, results
    [incident] = JobHandle(tmp_path / "home" / "jobs" / "killed").incidents()
    assert (incident.resumed_at, incident.steps_lost) == (10, 7)
