"""A script that changes while its job runs: no two ranks with different texts train together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs.job import Job

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Strategy

MODULE = "SCALE = 1.0\n"
SCRIPT = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from rekindle.training.torch import Session, StepSampler
import scale

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.ones(64, 4)
ran = []
sampler = StepSampler(64, 4)
given = {"model": model, "optimizer": optimizer, "sampler": sampler, "ddp": True}
with Session(**given, ignore=[ran]) as session:
    for step in session.steps(12):
        with step:
            if step.number == 6 and session.rank == 1 and not Path("edited").exists():
                Path("edited").touch()
                Path(scale.__file__).write_text("SCALE = 2.0\\n")
                os.kill(os.getpid(), signal.SIGKILL)
            loss = scale.SCALE * session.model(data[step.indices]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ran.append((step.number, scale.SCALE))
print("ran", ran[-1], flush=True)
"""


@pytest.mark.parametrize("restarts", [True, False], ids=["restart", "no restart"])
def test_a_module_changes(restarts: bool, job: Callable[..., Job], tmp_path: Path) -> None:
    """If a module changes, all ranks restart on the new text; without `restart` the job ends."""
    (tmp_path / "scale.py").write_text(MODULE)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    chosen = (Strategy.RECOVER_IN_PLACE, *((Strategy.RESTART,) if restarts else ()))
    run = job(nodes=1, processes=2, policy=Policy(strategies=chosen), script=script)
    outcome = run.end().outcome
    assert outcome == ("succeeded" if restarts else "failed"), run.story()
    [incident] = run.incidents()
    assert incident.cause.kind is FaultKind.SOURCE
    assert f"different texts of {tmp_path / 'scale.py'}" in incident.cause.message
    if restarts:
        for rank in range(2):
            logs = Path(run.spec.log_directory, "attempt_1", str(rank), "stdout.log")
            assert "ran (11, 2.0)" in logs.read_text()
    else:
        assert len(run.events_of(journal.Formed)) == 1
