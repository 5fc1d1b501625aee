"""A model of torch.compile: its checkpoints have the names of the model itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open
from waiting import run_command

from rekindle import names

SCRIPT = """
import sys
import torch
from rekindle.training.torch import Session

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if "compile" in sys.argv:
    model = torch.compile(model, backend="aot_eager")
if "parts" in sys.argv:
    model[0] = torch.compile(model[0], backend="aot_eager")
if "in-place" in sys.argv:
    model.compile(backend="aot_eager")
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    print("begins at", session.finished, flush=True)
    for step in session.steps(int(sys.argv[1])):
        with step:
            loss = session.model(torch.ones(2, 4)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""


def test_a_compiled_model_and_the_model_itself(tmp_path: Path) -> None:
    """A job may continue with another use of torch.compile, because the names do not change."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rekindle.cli.main", "run", "--job-id", "job"]
        command += ["--checkpoint-every", "3", "--checkpoint-dir", "store", "train.py", *arguments]
        home = {names.ENV_HOME: str(tmp_path / "home")}
        return run_command(command, cwd=tmp_path, env={**os.environ, **home})

    first = run("3", "compile")
    assert first.returncode == 0, first.stderr
    for steps, how in ((6, "parts"), (9, "in-place")):
        later = run(str(steps), how)
        assert later.returncode == 0, later.stderr
        assert f"begins at {steps - 3}" in later.stdout
    files = sorted((tmp_path / "store").glob("step-*/*.safetensors"))
    assert len(files) == 3
    for file in files:
        with safe_open(file, "pt") as state:
            assert "model.0.weight" in state.keys()  # noqa: SIM118  safe_open has no __contains__
