"""Scripts that forget something: refused, or reported in a line, on the path of `rekindle run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from waiting import run_command

from rekindle import names
from rekindle.testing.handle import JobHandle

SCRIPT = """
import os, subprocess, sys
import torch
from rekindle.training.torch import Session, StepSampler

lr, seed, steps, what = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
noise, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
sampler = StepSampler(64, 4)
extra = {} if what == "forgets" else {"noise": noise}
settings = {"sampler": sampler, "ddp": True, "seed": seed, "extra": extra}
with Session(model=model, optimizer=optimizer, **settings) as session:
    print("first start", session.first_start, os.environ["REKINDLE_FIRST_START"], flush=True)
    if what == "starts" and session.finished == 0:
        child = "import runpy, sys; sys.argv[4] = 'child'; runpy.run_path(sys.argv[0])"
        words = [sys.executable, "-c", child.replace("sys.argv[0]", repr(sys.argv[0]))]
        done = subprocess.run([*words, *sys.argv[1:]], capture_output=True, text=True)
        print("child", done.returncode, done.stderr.splitlines()[-1], flush=True)
    for step in session.steps(steps):
        with step:
            scale = torch.rand(1, generator=noise)
            loss = session.model(scale * torch.ones(4)).sum()
            step.log(loss=loss if step.number != 3 else loss * float("nan"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if what == "loses" and os.environ["RANK"] == "1":
                torch.rand(1, generator=other)
                if step.number == 11 and not os.path.exists("lost"):
                    open("lost", "w").close()
                    os.abort()
    if what == "raises":
        try:
            raise OSError("the disk is broken")
        except OSError:
            raise ValueError("cannot save the model")
    if what == "aborts":
        os.write(2, b"driver: device 7 is busy\\n")
        os._exit(3)
"""


def run(folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Start the job, or start it again."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "rekindle.cli.main", "run", "--log-format", "short"]
    command += ["--job-id", "job", "--nproc-per-node", str(ranks), "--checkpoint-every", "5"]
    home = {names.ENV_HOME: str(folder / "home")}
    return run_command([*command, "train.py", *arguments], cwd=folder, env={**os.environ, **home})


def test_forgotten_state_is_refused(tmp_path: Path) -> None:
    """A generator that the Session does not keep ends the job before the second step counts."""
    done = run(tmp_path, "0.1", "0", "10", "forgets")
    assert done.returncode == 1
    text = "noise (a Generator): give the Session extra={'noise': noise}"
    assert text in done.stderr
    assert "step 1 changed objects" in done.stderr
    [rank, _] = JobHandle(tmp_path / "home" / "jobs" / "job").records().values()
    assert max(rank) == 1  # the step logged its values, and did not count


def test_forgotten_state_of_a_changed_script_is_refused(tmp_path: Path) -> None:
    """A rank is lost after the first step of a new text: its new process searches as well.

    Only this rank has the object, so the others cannot find it.
    """
    assert run(tmp_path, "0.1", "0", "10", "usual").returncode == 0
    done = run(tmp_path, "0.1", "0", "20", "loses")
    assert (tmp_path / "lost").exists()
    assert done.returncode == 1
    assert "other (a Generator): give the Session extra={'other': other}" in done.stderr


def test_what_differs_is_reported(tmp_path: Path) -> None:
    """Another rate, seed and world size, a NaN, a child and the reason of an end have a line each.

    The first start is known to the script.
    """
    first = run(tmp_path, "0.1", "0", "10", "starts")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("first start True 1") == 2
    assert first.stderr.count("step 3: loss is not finite (nan), and the record has null") == 2
    assert "SessionError: this process is a child of rank 0 of job job" in first.stdout
    again = run(tmp_path, "0.01", "7", "12", "raises", ranks=1)
    assert again.returncode == 1
    assert "first start False 0" in again.stdout
    lines = (
        "optimizer.param_groups[0] keeps the values of the state, which began with lr=0.1; the "
        "script gives lr=0.01",
        "the seed is 7, and was 0 before",
        "the world has 1 rank with 4 samples each, and had 2 ranks with 4 samples each before",
        "the script raised ValueError: cannot save the model while it handled OSError: the disk is "
        "broken",
    )
    for line in lines:
        assert again.stderr.count(line) == 1, again.stderr
    last = run(tmp_path, "0.01", "7", "14", "aborts", ranks=1)
    assert last.returncode == 1
    assert "keeps the values of the state, which began with lr=0.1" in last.stderr
    assert "seed" not in last.stderr
    text = r"rank 0 ended with exit status 3; the end of its stderr: .*driver: device 7 is busy\n"
    assert re.search(text, last.stderr), last.stderr
