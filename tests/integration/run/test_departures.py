"""The end of launchers and coordinators: ranks save in their own handler, and no snapshot is lost.

The ranks of the script have DataLoader workers. They save at SIGUSR1 and SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from jobs import Place, Run
from waiting import wait_until

from rekindle import names
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.recovery.journal import journal

SAVES = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from rekindle.training.torch import Session, StepSampler

rank = os.environ["RANK"]

def save(number, frame):
    with open(f"saved-{signal.Signals(number).name}-{rank}", "a") as saved:
        saved.write(f"{os.getpid()}\\n")
    if number == signal.SIGTERM:
        sys.exit(0)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(4096, 4))
loader = DataLoader(data, batch_sampler=StepSampler(4096, 4), num_workers=1)
with Session(model=model, optimizer=optimizer, loader=loader, ddp=True) as session:
    for step in session.steps(100_000):
        with step:
            loss = session.model(step.batch[0]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.number == 3:
            print("trains", os.getpid(), flush=True)
        time.sleep(0.02)
"""


class Saving:
    """A job of two ranks that save at a signal, on one machine or on two."""

    def __init__(self, place: Place, *, machines: int) -> None:
        self.place = place
        script = place.script(SAVES)
        two = ("--nnodes", "2", "--node-rank", "0") if machines == 2 else ("--nproc-per-node", "2")
        self.run = place.start(*two, "--snapshot-every", "1", script)
        self.launchers = [self.run]
        if machines == 2:
            self.run.wait_event(journal.NodeJoined)
            self.launchers.append(place.join(self.run))
        wait_until(lambda: len(self.ranks()) == 2, f"two ranks that train{self.story()}")

    def ranks(self) -> list[int]:
        lines = "".join(each.stdout for each in self.launchers).splitlines()
        return [int(line.split()[-1]) for line in lines if "trains" in line]

    def story(self) -> str:
        return "".join(each.story() for each in self.launchers)

    def saved(self, number: signal.Signals) -> set[int]:
        """Return the processes that have saved at this signal."""
        files = self.place.folder.glob(f"saved-{number.name}-*")
        return {int(line) for file in files for line in file.read_text().splitlines()}

    def end(self) -> None:
        """Check that only the ranks have saved, and that the newest snapshot is a checkpoint."""
        for launcher in self.launchers:
            launcher.end()
        assert self.saved(signal.SIGTERM) == set(self.ranks()), self.story()
        assert newest(self.run) > 3, self.story()


def newest(run: Run) -> int:
    """Return the step of the newest checkpoint of a job, or -1."""
    store = DirectoryStore(Path(run.directory.path, names.CHECKPOINT_DIRECTORY))
    found = store.newest().checkpoint
    return -1 if found is None else found.manifest.step


def processes_of_rekindle(saving: Saving) -> list[int]:
    """Return the launchers, coordinators and agents of a job."""
    launchers = [launcher.process.pid for launcher in saving.launchers]
    others = [p.pid for kind in ("coordinator", "agent") for p in saving.run.all(kind)]
    return [*launchers, *(pid for pid in others if psutil.Process(pid).ppid() in launchers)]


def test_a_scheduler_signals_all_processes_of_two_machines(place: Place) -> None:
    """SIGUSR1 of a launcher reaches the ranks. After SIGTERM of all processes each rank saves.

    The job ends as stopped, with a final checkpoint.
    """
    saving = Saving(place, machines=2)
    for launcher in saving.launchers:
        launcher.signal(signal.SIGUSR1)
    ranks = set(saving.ranks())
    wait_until(lambda: saving.saved(signal.SIGUSR1) == ranks, f"all ranks{saving.story()}")
    for pid in processes_of_rekindle(saving):
        os.kill(pid, signal.SIGTERM)
    saving.end()
    ended = saving.run.events_of(journal.Ended)[-1]
    assert ended.outcome == "stopped"
    assert not journal.incidents(saving.run.events()), saving.story()
    assert [launcher.process.returncode for launcher in saving.launchers] == [143, 143]


@pytest.mark.parametrize("coordinator", [False, True], ids=["launcher", "launcher and coordinator"])
def test_a_killed_launcher_loses_no_snapshot(place: Place, coordinator: bool) -> None:
    """After SIGKILL of the launcher the ranks save, and the agent writes the final checkpoint.

    Without a coordinator the agent does this alone.
    """
    saving = Saving(place, machines=1)
    other = [saving.run.only("coordinator").pid] if coordinator else []
    for pid in (saving.run.process.pid, *other):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    saving.end()
    assert bool(saving.run.events_of(journal.Ended)) is not coordinator
