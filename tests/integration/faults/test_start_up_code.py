"""A script whose start-up code empties its outputs: a replaced rank runs it again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from waiting import run_command

from rekindle import names

SCRIPT = """
import json, os, shutil, signal
from pathlib import Path
import torch
from rekindle.training.torch import Session

shutil.rmtree("outputs", ignore_errors=True)
os.makedirs("outputs")
log = open("log.csv", "w", buffering=1)
print("step,loss", file=log)
with open("settings.json", "w") as file:
    json.dump({"lr": 0.1}, file)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(8):
        with step:
            if step.number == 5 and os.environ["REKINDLE_FIRST_START"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = session.model(torch.ones(4)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(step.number, float(loss), sep=",", file=log)
        Path("outputs", f"{step.number}.txt").write_text("a sample")
"""


def test_outputs_of_the_run_stay(tmp_path: Path) -> None:
    """The outputs of the run stay under another name, and a line names the place and remedy."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "rekindle.cli.main", "run", "--log-format", "short"]
    command += ["--snapshot-every", "1", "--nproc-per-node", "1", "train.py"]
    home = {names.ENV_HOME: str(tmp_path / "home")}
    done = run_command(command, cwd=tmp_path, env={**os.environ, **home})
    assert done.returncode == 0, done.stderr
    before = (tmp_path / ".rekindle-earlier" / "log.csv.before-1").read_text().splitlines()
    assert [line.split(",")[0] for line in before] == ["step", "0", "1", "2", "3", "4"]
    after = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in after] == ["step", "5", "6", "7"]
    kept = sorted(
        path.name for path in (tmp_path / ".rekindle-earlier" / "outputs.before-1").iterdir()
    )
    assert kept == [f"{number}.txt" for number in range(5)]
    assert not (tmp_path / ".rekindle-earlier" / "settings.json.before-1").exists()
    script = tmp_path / "train.py"
    assert f"{script}:7 removes {tmp_path / 'outputs'}, which is older" in done.stderr
    assert f"{script}:9 empties {tmp_path / 'log.csv'}, which is older" in done.stderr
    assert done.stderr.count("REKINDLE_FIRST_START") == 2
