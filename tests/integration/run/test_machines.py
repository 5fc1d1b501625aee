"""Several machines in one job: their joins, the loss of one, and a spare."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import acts
import pytest
from jobs import Place, Run
from reference_tables.files import unlisted
from waiting import wait_until

from rekindle import names
from rekindle.recovery.journal import journal

WAITS = """
import os, time

print("runs", os.environ["RANK"])
while not os.path.exists("go"):
    time.sleep(0.02)
"""


class Machines:
    """The first machine of a job of two nodes, and the newest machine that has joined."""

    def __init__(self, place: Place, *options: str) -> None:
        self.place = place
        options = ("--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2", *options)
        self.first = place.start_quick(place.script(WAITS), *options)
        self.first.wait_event(journal.NodeJoined)

    def join(self) -> Run:
        """Start a second machine; return it when its ranks run."""
        self._alone = self.folders()
        self.second = self.place.join(self.first)
        until_runs(self.second)
        return self.second

    def folders(self) -> set[str]:
        """Return the temporary folders of all machines."""
        return {path.name for path in self.place.temporary.glob("rekindle-*")}

    def end_second(self, number: signal.Signals, status: int) -> None:
        """End the second machine; check that its agent, its ranks and its folder end with it."""
        self.second.signal(number)
        wait_until(lambda: self.second.process.poll() is not None, "the end of the machine")
        assert self.second.process.returncode == status
        assert self.folders() == self._alone
        assert len(self.first.all("agent")) == 1

    def joined(self) -> list[int]:
        """Return the nodes of the agents that joined, in order."""
        return [event.node for event in self.first.events_of(journal.NodeJoined)]

    def clean(self) -> None:
        """Remove the folders of killed machines, which no process removes."""
        self.place.wait_for_silence()
        for folder in self.place.temporary.glob("rekindle-*"):
            shutil.rmtree(folder)


def until_runs(machine: Run) -> None:
    wait_until(
        lambda: machine.stdout.count("runs") == 2, f"the ranks of a machine{machine.story()}"
    )


def the_first_machine_prints_how_to_join(machines: Machines) -> None:
    """The printed command has the address, the port and the secret of the job."""
    first = machines.first
    [hint] = wait_until(
        lambda: [line for line in first.stderr.splitlines() if "join with" in line], "the hint"
    )
    where = first.endpoint()
    assert f"--coordinator {where.host}:{where.port} --no-python" in hint
    assert f"{names.ENV_SECRET}={first.directory.secret()} rekindle run" in hint


def a_second_machine_joins(machines: Machines) -> None:
    """Another node joins with --coordinator and the secret only."""
    second = machines.join()
    assert sorted(second.stdout.splitlines()) == ["[default2]:runs 2", "[default3]:runs 3"]


def a_joined_machine_is_terminated(machines: Machines) -> None:
    """After SIGTERM of a machine none of its processes remain, and another machine can join."""
    machines.end_second(signal.SIGTERM, 143)
    machines.join()


def a_joined_machine_is_interrupted(machines: Machines) -> None:
    """After SIGINT of a machine none of its processes remain, and another machine can join."""
    machines.end_second(signal.SIGINT, 130)
    machines.join()


def a_spare_takes_the_place_of_a_machine_that_is_killed(machines: Machines) -> None:
    """A spare waits until a machine is killed; its ranks then replace the ranks of that machine."""
    before = machines.joined()
    third = machines.place.join(machines.first, spare=True)
    wait_until(lambda: machines.joined() == [*before, names.SPARE], "the spare")
    assert third.stdout == ""
    machines.second.signal(signal.SIGKILL)
    until_runs(third)
    assert machines.joined() == [*before, names.SPARE, 1]
    machines.second.process.wait()
    machines.second = third


def all_machines_end_with_the_job(machines: Machines) -> None:
    """The job succeeds, and the other machines end with status 0."""
    (machines.place.folder / "go").touch()
    machines.first.end(0)
    machines.second.end(0)


def the_reference_lists_each_file(machines: Machines) -> None:
    """docs/reference/job-directory.md has a row for each file that the job has left."""
    assert unlisted(machines.place.home) == []


ACTS = [
    the_first_machine_prints_how_to_join,
    a_second_machine_joins,
    a_joined_machine_is_terminated,
    a_joined_machine_is_interrupted,
    a_spare_takes_the_place_of_a_machine_that_is_killed,
    all_machines_end_with_the_job,
    the_reference_lists_each_file,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job that loses its second machine three times."""
    with Place(tmp_path_factory.mktemp("machines") / "place") as place:
        machines = Machines(place, "--max-restarts", "3")
        yield acts.Played(ACTS, machines)
        machines.clean()


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_machines(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)


def test_a_job_that_has_lost_a_machine(place: Place) -> None:
    """Without a restart left the job fails, and the reason names the node."""
    machines = Machines(place)
    second = machines.join()
    second.signal(signal.SIGKILL)
    machines.first.end(1)
    second.end(-9)
    assert "node 1" in machines.first.events_of(journal.Ended)[-1].reason
    machines.clean()
