"""SIGSTOP of processes of a job, and SIGCONT later: no step is lost, and no other number results.

`docker pause`, a snapshot of a virtual machine and a debugger do the same. The processes continue
one after another, so that some of them see the silence of others that are still stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest
from jobs import Place, Run
from waiting import wait_until

from rekindle.engines.client import ANSWER_S, SILENCE_S
from rekindle.recovery.journal import journal

# Longer than any process waits for a silent one: agents for 4.5 s, the launcher for 20 s.
LONGEST_S = 1.2 * (SILENCE_S + ANSWER_S)

SCRIPT = """
import time, torch
from rekindle.training.torch import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(60):
        with step:
            seed = torch.Generator().manual_seed(10 * step.number + session.rank)
            loss = session.model(torch.randn(8, 4, generator=seed)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.05)
print("digest", [parameter.double().sum().item() for parameter in model.parameters()])
"""
OPTIONS = ("--nnodes", "2", "--nproc-per-node", "1", "--snapshot-every", "5")


def everything(run: Run) -> list[psutil.Process]:
    """Return all processes of the job, with the launcher."""
    return run.place.processes()


def coordinator_and_agents(run: Run) -> list[psutil.Process]:
    return [*run.all("coordinator"), *run.all("agent")]


def fork_servers(run: Run) -> list[psutil.Process]:
    return run.all("fork server")


def launcher(run: Run) -> list[psutil.Process]:
    return [psutil.Process(run.process.pid)]


def suspend(processes: list[psutil.Process], seconds: float) -> None:
    """Stop processes, and let them continue later."""
    for process in processes:
        process.suspend()
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, "the end of the suspension", 2 * seconds)
    for process in processes:
        process.resume()


def digests(run: Run) -> list[str]:
    """Return the digests of the trained model that the ranks have printed."""
    return [line.split("digest")[1] for line in run.stdout.splitlines() if "digest" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the digests of a run without a fault."""
    with Place(tmp_path_factory.mktemp("undisturbed") / "place") as place:
        return digests(place.start(*OPTIONS, place.script(SCRIPT)).end(0))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("chosen", "seconds"),
    [
        (everything, LONGEST_S),
        (launcher, LONGEST_S),
        pytest.param(fork_servers, LONGEST_S, marks=pytest.mark.soak),
        pytest.param(everything, 5.0, marks=pytest.mark.soak),
        pytest.param(everything, 70.0, marks=pytest.mark.soak),
        pytest.param(launcher, 70.0, marks=pytest.mark.soak),
        pytest.param(coordinator_and_agents, 70.0, marks=pytest.mark.soak),
    ],
)
def test_processes_that_are_stopped_for_a_while(
    place: Place,
    undisturbed: list[str],
    chosen: Callable[[Run], list[psutil.Process]],
    seconds: float,
) -> None:
    """All processes may be stopped for longer than any limit of the job."""
    run = place.start(*OPTIONS, place.script(SCRIPT))
    run.wait_event(journal.FirstStep)
    suspend(chosen(run), seconds)
    run.end(0)
    assert digests(run) == undisturbed
    assert [incident for incident in run.incidents() if incident.steps_lost] == []
    assert len(run.events_of(journal.RanksStarted)) == 2  # no process was replaced
