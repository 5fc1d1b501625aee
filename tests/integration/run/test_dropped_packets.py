"""A network that drops all packets: the lease is not held, and agents join again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from jobs import Place, Run
from networks import ADDRESSES, DEVICE, NEEDS_NAMESPACES, Network, network
from waiting import status_of, wait_until

from rekindle import names
from rekindle.recovery.journal import journal

pytestmark = [NEEDS_NAMESPACES, pytest.mark.timeout(300)]

SCRIPT = """
import os, time, torch
from rekindle.training.torch import Session

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Session(model=model, optimizer=optimizer, ddp=True) as session:
    for step in session.steps(40):
        while step.number == 30 and not os.path.exists("go"):
            time.sleep(0.01)
        with step:
            seed = torch.Generator().manual_seed(10 * step.number + session.rank)
            loss = session.model(torch.randn(2, 4, generator=seed)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)
print("digest", [parameter.double().sum().item() for parameter in model.parameters()])
"""

GLOO = {"GLOO_SOCKET_IFNAME": DEVICE}  # the machines have no names that gloo could look up

# Takes the lease of a job, and prints the names of events and the error that ends the stream.
HOLDER = """
import sys
from rekindle.engines.client import JobClient
from rekindle.errors import JobError
from rekindle.job.spec import Endpoint

host, port, secret, name = sys.argv[1:]
client = JobClient(Endpoint(host=host, port=int(port), pid=0, attempt=0), secret)
try:
    with client.steer(holder=name, token=name) as events:
        print("holds", flush=True)
        for event in events:
            pass
except JobError as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def machines() -> Iterator[Network]:
    with network() as found:
        yield found


def first_machine(place: Place, machines: Network) -> Run:
    """Start the machine of the coordinator, with node 0 of 2."""
    options = ["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "1", "--max-restarts", "3"]
    options += ["--listen", f"{ADDRESSES[0]}:0", "--local-addr", ADDRESSES[0]]
    return place.start(
        *options, place.script(SCRIPT), program=machines.inside(0), env=place.environment(GLOO)
    )


def second_machine(place: Place, machines: Network, first: Run) -> Run:
    """Let the other machine join as node 1."""
    where = first.endpoint()
    environment = place.environment(GLOO | {names.ENV_SECRET: first.directory.secret()})
    join = ["--coordinator", f"{where.host}:{where.port}", "--node-rank", "1"]
    return Run(place, join, "job", env=environment, program=machines.inside(1))


def test_a_machine_that_is_out_of_reach_joins_again(place: Place, machines: Network) -> None:
    """A node behind a broken network is lost, and its machine joins again. No number changes."""
    first = first_machine(place, machines)
    second = second_machine(place, machines, first)
    first.wait_event(journal.FirstStep)
    machines.forward(on=False)
    assert first.wait_event(journal.FaultSeen).fault.node == 1
    machines.forward(on=True)
    (place.folder / "go").touch()
    wait_until(first.has_ended, "the end of the job")
    assert first.process.returncode == 0, first.story() + second.story()
    texts = (first.stdout + second.stdout).splitlines()
    found = [line.split("digest")[1] for line in texts if "digest" in line]
    assert len(found) == 2
    assert len(set(found)) == 1
    place.wait_for_silence()


class Holder:
    """A process on a machine that takes the lease and keeps it."""

    def __init__(self, run: Run, inside: list[str], name: str) -> None:
        where, secret = run.endpoint(), run.directory.secret()
        self._output = run.place.folder / f"{name}.out"
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-c", HOLDER, where.host, str(where.port), secret, name],
                stdout=output,
            )

    def until(self, text: str) -> None:
        """Wait until the process has printed the text."""
        wait_until(lambda: text in self._output.read_text(), text)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        status_of(self.process)


@pytest.mark.soak
def test_a_holder_behind_a_broken_network_loses_the_lease(place: Place, machines: Network) -> None:
    """The coordinator sees no end of its connection, but another process gets the lease."""
    run = first_machine(place, machines)
    second_machine(place, machines, run)
    run.wait_event(journal.FirstStep)
    launcher = psutil.Process(run.process.pid)
    launcher.suspend()
    with Holder(run, machines.inside(1), "far") as far:
        far.until("holds")
        machines.forward(on=False)
        with Holder(run, machines.inside(0), "near") as near:
            near.until("holds")
            machines.forward(on=True)
            far.until("Error")
    launcher.resume()
    (place.folder / "go").touch()
    wait_until(run.has_ended, "the end of the job")
    place.wait_for_silence()
