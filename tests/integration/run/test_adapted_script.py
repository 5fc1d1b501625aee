"""A script that `rekindle adapt` has changed: killed ranks change no line and no weight."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from repository import SUPPORT
from waiting import run_command

from rekindle import names
from rekindle.recovery.policy.policy import Strategy
from rekindle.testing.handle import JobHandle

# Before a batch's update, a rank kills itself: the rank by the number of finished steps.
DIES = """
import signal

def die(session):
    dies = {70: 1, 101: 0} if os.environ.get("DIES") else {}
    if dies.get(session.finished) == session.rank and session.generation == 1 + (
        session.finished > 70
    ):
        os.kill(os.getpid(), signal.SIGKILL)


def setup():"""
UPDATE = "optimizer.zero_grad()"


def rekindle(folder: Path, *words: str, dies: bool = False) -> str:
    """Run a command; return what it prints."""
    command = [sys.executable, "-m", "rekindle.cli.main", *words]
    environment = {**os.environ, names.ENV_HOME: str(folder / "home")}
    done = run_command(command, cwd=folder, env=environment | ({"DIES": "1"} if dies else {}))
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_an_adapted_script_is_exact(tmp_path: Path) -> None:
    """All lines of all epochs and the saved model are those of a run without faults."""
    (tmp_path / "train.py").write_text((SUPPORT / "adaptable" / "ddp_epochs.py").read_text())
    rekindle(tmp_path, "adapt", "--write", "train.py")
    text = (tmp_path / "train.py").read_text()
    assert text.count(UPDATE) == text.count("\ndef setup():") == 1
    text = text.replace(UPDATE, f"die(session); {UPDATE}").replace("\ndef setup():", DIES)
    (tmp_path / "train.py").write_text(text)
    lines, models = [], []
    for job in ("plain", "killed"):
        options = ("--log-format", "short", "--job-id", job, "--nproc-per-node", "2")
        script = ("train.py", "--out", f"{job}.pt")
        printed = rekindle(tmp_path, "run", *options, *script, dies=job == "killed")
        lines.append([each for each in printed.splitlines() if "epoch " in each])
        models.append(torch.load(tmp_path / f"{job}.pt"))
    assert len(lines[0]) == 5 * 3  # two batches of an epoch, and its score
    assert lines[1] == lines[0]
    plain, killed = (each["model"] for each in models)
    assert plain.keys() == killed.keys()
    assert all(torch.equal(plain[name], killed[name]) for name in plain)
    incidents = JobHandle(tmp_path / "home" / "jobs" / "killed").incidents()
    assert [each.strategy for each in incidents] == [Strategy.RECOVER_IN_PLACE] * 2
    assert [each.steps_lost for each in incidents] == [0, 0]
