"""Processes and shared resources that a killed rank leaves behind, when its replacement starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_jobs.job import Job
from waiting import LIMIT_S, wait_until

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

# Each rank starts a server in a session of its own, and has a semaphore with a name and a socket in
# the temporary folder of multiprocessing. Its next process needs the same port. The script ends
# when a file exists.
SCRIPT = '''
import json, multiprocessing.connection, os, socket, subprocess, sys, time
from pathlib import Path

import torch

from rekindle.training.torch import Session, StepSampler

SERVER = """
import os, socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(server.getsockname()[1], child.pid, flush=True)
time.sleep(600)
"""
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
port = folder / f"port-{rank}"
number = port.read_text() if port.exists() else "0"
command = [sys.executable, "-c", SERVER, number]
helper = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
number, child = helper.stdout.readline().split()  # nothing to read if the port is taken
port.write_text(number)
semaphore = multiprocessing.get_context("spawn").Semaphore()
listener = multiprocessing.connection.Listener(family="AF_UNIX")
facts = {"helper": helper.pid, "child": int(child), "semaphore": semaphore._semlock.name}
facts["folder"] = str(Path(listener.address).parent)
done = folder / f"facts-{rank}-{os.getpid()}.unfinished"
done.write_text(json.dumps(facts))
done.rename(done.with_suffix(".json"))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Session(model=model, optimizer=optimizer, sampler=StepSampler(64, 4, seed=0)) as session:
    for step in session.steps(10**6):
        with step:
            time.sleep(0.01)
        if (folder / "end").exists():
            break
'''


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Start a job of two ranks with helpers."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    policy = Policy(hang_timeout_s=LIMIT_S)
    with Job(tmp_path, processes=2, script=script, policy=policy) as started:
        yield started


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def facts_of(job: Job, pid: int) -> dict[str, Any]:
    """Return the facts that a process of rank 1 has written; wait for them."""
    file = job.folder / f"facts-1-{pid}.json"
    job.wait(file.exists, f"the helper of process {pid}")
    return json.loads(file.read_text())


def test_helpers_and_shared_objects_of_a_killed_rank(job: Job) -> None:
    """They are gone when its replacement starts. Those of other ranks stay until the job ends."""
    job.wait_event(journal.FirstStep)
    old, other = job.pid(1), job.pid(0)
    before = facts_of(job, old)
    job.kill(1)
    job.wait_event(journal.FirstStep, 2)
    after = facts_of(job, job.pid(1))
    assert not alive(before["helper"])
    assert not alive(before["child"])
    assert after["helper"] != before["helper"]
    assert not Path(before["folder"]).exists()
    assert Path(after["folder"]).is_dir()
    semaphore = Path("/dev/shm", "sem." + before["semaphore"].lstrip("/"))
    wait_until(lambda: not semaphore.exists(), "no semaphore of the killed rank")
    assert job.pid(0) == other
    assert not job.events_of(journal.FaultSeen)[1:]
    job.kill_node(0)
    wait_until(lambda: not alive(after["helper"]), "the end of the helper of a killed agent")
    (job.folder / "end").touch()
