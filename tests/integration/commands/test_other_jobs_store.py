"""`rekindle run` with the checkpoints of another job: refused, or taken over on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stores.proxy import Stall, proxied
from stores.servers import ENVIRONMENT, rclone
from waiting import run_command

from rekindle import names

SCRIPT = """
import sys
import torch
from rekindle.training.torch import Session, StepSampler

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Session(model=model, optimizer=optimizer, sampler=StepSampler(64, 4)) as session:
    print("begins at", session.finished, flush=True)
    for step in session.steps(int(sys.argv[1])):
        with step:
            loss = model(torch.ones(4)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""


def test_a_store_of_another_job(tmp_path: Path) -> None:
    """Another job id is refused with both ids and the option; the same id, and the option, work."""
    (tmp_path / "train.py").write_text(SCRIPT)
    home = tmp_path / "home"

    def run(job: str, steps: int, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rekindle.cli.main", "run", "--job-id", job]
        command += ["--log-format", "short", "--checkpoint-every", "5", *options]
        command += ["train.py", str(steps)]
        return run_command(command, cwd=tmp_path, env={**os.environ, names.ENV_HOME: str(home)})

    store = ("--checkpoint-dir", "store")
    assert run("first", 5, *store).returncode == 0
    refused = run("second", 10, *store)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"rekindle: {tmp_path}/store has checkpoints of job 'first' (step 5), and this is job "
        "'second': to continue that job, give --job-id first; to begin this job with its state, "
        f"give --resume-from {tmp_path}/store and another --checkpoint-dir, or none\n"
    )
    assert not (home / "jobs" / "second").exists()
    again = run("first", 10, *store)
    assert again.returncode == 0
    assert "begins at 5" in again.stdout
    taken = run("second", 15, "--resume-from", "store")
    assert taken.returncode == 0, taken.stderr
    assert "begins at 10" in taken.stdout
    assert f"job second begins with {tmp_path}/store/step-0000000010-g000002" in taken.stderr
    longer = run("second", 20, "--resume-from", "first")
    assert longer.returncode == 0
    assert "begins at 15" in longer.stdout
    assert "continues from its own checkpoint of step 15; --resume-from first has no" in (
        longer.stderr
    )
    same = run("third", 5, *store, "--resume-from", "store")
    assert same.returncode == 2
    none = run("third", 5, "--resume-from", "nowhere")
    assert none.returncode == 2
    assert "there is no folder" in none.stderr


def test_a_store_that_does_not_answer_at_first(tmp_path: Path) -> None:
    """If the launcher cannot see whose checkpoints a store has, the agents refuse another job's."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, **ENVIRONMENT, names.ENV_HOME: str(tmp_path / "home")}
    with rclone(tmp_path / "s3") as server, proxied(server.port) as proxy:
        command = [sys.executable, "-m", "rekindle.cli.main", "run", "--log-format", "short"]
        command += ["--checkpoint-every", "5"]
        command += ["--checkpoint-dir", server.location(port=proxy.port)]

        def run(job: str) -> subprocess.CompletedProcess[str]:
            proxy.seen.clear()
            whole = [*command, "--job-id", job, "train.py", "5"]
            return run_command(whole, cwd=tmp_path, env=environment)

        first = run("first")
        assert first.returncode == 0, first.stderr
        proxy.rule = lambda request: Stall() if request.number == 0 else None
        second = run("second")
    assert second.returncode == 1
    assert "does not answer; whose checkpoints it has is unknown" in second.stderr
    assert "has checkpoints of job 'first' (step 5), and this is job 'second'" in second.stderr
    assert "begins at" not in second.stdout
