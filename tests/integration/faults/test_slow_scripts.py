"""Healthy scripts that are slow once: how often the job takes them for a hang, and what it costs.

Each script continues without help. The default settings apply.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from training_jobs.job import Job

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy

SCRIPT = """
import fcntl, os, socket, subprocess, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from rekindle.training.torch import Session, StepSampler

KIND, SECONDS, FOLDER = "{kind}", {seconds}, Path("{folder}")
rank = int(os.environ["RANK"])

def left():
    # The time until the resource is there again: it has been away since the first use.
    since = FOLDER / "since"
    if not since.exists():
        since.write_text(str(time.time()))
    return max(0.0, float(since.read_text()) + SECONDS - time.time())

def holder(code):
    if not (FOLDER / "holder").exists():
        (FOLDER / "holder").touch()
        code = "import fcntl, sys, time\\n" + code
        command = [sys.executable, "-c", code, str(FOLDER)]
        done = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        done.stdout.readline()

def slow(kind):
    if kind == "sleep":  # the same work takes as long in each process
        time.sleep(SECONDS)
    elif kind == "nfs":
        fifo = FOLDER / "fifo"
        if not fifo.exists():
            os.mkfifo(fifo)
        holder(
            f"print(flush=True)\\ntime.sleep({{SECONDS}})\\n"
            "open(sys.argv[1] + '/fifo', 'w').write('x' * 9)"
        )
        if left() > 0.0:
            fifo.open().read()
    elif kind == "lock":
        with open(FOLDER / "lock", "w") as lock:
            holder(
                "lock = open(sys.argv[1] + '/lock', 'w')\\nfcntl.flock(lock, fcntl.LOCK_EX)\\n"
                f"print(flush=True)\\ntime.sleep({{SECONDS}})"
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
    elif kind == "retry":
        pause = 0.5
        while left() > 0.0:
            time.sleep(pause)
            pause *= 2
    elif kind == "upload":  # 10 packets a second
        ours, theirs = socket.socketpair()
        for _ in range(int(10 * SECONDS)):
            ours.send(bytes(1000))
            theirs.recv(1000)
            time.sleep(0.1)

class Data(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        if KIND == "shard" and index // 256 == 1 and index % 256 == 0:
            time.sleep(SECONDS)
        return torch.full((4,), index / 4096)

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = StepSampler(4096, 4, shuffle=False)
loader = DataLoader(Data(), batch_sampler=sampler, num_workers=1)
with Session(model=model, optimizer=optimizer, loader=loader, ddp=True) as session:
    for step in session.steps(60):
        with step:
            if KIND == "cold" and step.number == 0 and rank == 1:
                slow("sleep")
            if KIND == "batch" and step.number == 20 and rank == 1:
                slow("sleep")
            if KIND in ("nfs", "lock", "retry") and step.number == 20 and rank == 1:
                slow(KIND)
            loss = session.model(step.batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
            time.sleep(0.02)
        if KIND == "upload" and step.number == 20 and rank == 0:
            slow("upload")
            (FOLDER / "uploaded").touch()
        if KIND == "sleep" and step.number == 20 and rank == 0:
            slow("sleep")
            (FOLDER / "uploaded").touch()
"""


class Slow(NamedTuple):
    """A reason to be slow, and how many false alarms it may cost at most."""

    kind: str
    seconds: float
    alarms: int


SLOW = (
    Slow("cold", 45.0, 0),
    Slow("cold", 90.0, 1),
    Slow("batch", 15.0, 1),
    Slow("batch", 45.0, 3),
    Slow("shard", 20.0, 2),
    Slow("nfs", 25.0, 2),
    Slow("lock", 25.0, 2),
    Slow("retry", 25.0, 2),
    Slow("upload", 45.0, 0),
    Slow("upload", 90.0, 0),
    Slow("sleep", 45.0, 0),
    Slow("sleep", 200.0, 0),
)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slow", SLOW, ids=lambda slow: f"{slow.kind}-{slow.seconds:g}")
def test_a_slow_script_continues(slow: Slow, job: Callable[..., Job], tmp_path: Path) -> None:
    """A script that is slow once succeeds without a lost step, after few false alarms.

    Work between two steps is done once, and costs no false alarm.
    """
    script = tmp_path / "slow.py"
    fields = {"kind": slow.kind, "seconds": slow.seconds, "folder": tmp_path}
    script.write_text(SCRIPT.format(**fields))
    run = job(nodes=1, processes=2, policy=Policy(), script=script)
    ended = run.end(600.0)
    assert ended.outcome == "succeeded", run.story()
    faults = [event for event in run.events() if isinstance(event, journal.FaultSeen)]
    ends = [f"{event.fault.message.rpartition('(no progress for ')[2]}" for event in faults]
    print(f"| {slow.kind} | {slow.seconds:g} s | {len(faults)} | {'; '.join(ends)} |")
    assert all(event.fault.kind is FaultKind.HANG for event in faults), run.story()
    assert len(faults) <= slow.alarms, run.story()
    if slow.kind in ("upload", "sleep"):
        assert (tmp_path / "uploaded").exists()
