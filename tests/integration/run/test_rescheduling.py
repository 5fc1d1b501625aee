"""Reschedules of a job or of one node on simulated hosts, and a user's approval and commands."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator

import acts
import pytest
from host_conditions import set_condition
from jobs import Place, Run
from waiting import wait_until

from rekindle import names
from rekindle.agent.devices.tools import SimulatedCondition
from rekindle.cli import main as cli
from rekindle.engines.hosts import HostLog
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

# Records how often its place was filled and how often it was started there. Then it fails as often
# as its argument specifies, or waits for a file.
COUNTS = """
import os, sys, time

placed, started = os.environ["MA_SCHEDULE_CNT"], os.environ["MA_PROC_START_CNT"]
rank = os.environ["RANK"]
with open("counts", "a") as file:
    file.write(f"{rank} {placed} {started}\\n")
failures = int(sys.argv[1])
if rank == "1" and failures:
    count = 0, 1
    while count[0] < count[1]:  # until the other one has said so as often
        time.sleep(0.02)
        with open("counts") as file:
            ranks = [line[0] for line in file]
        count = ranks.count("0"), ranks.count("1")
    if sum(count) <= 2 * failures:
        sys.exit(3)
while failures == 0 and not os.path.exists("go"):
    time.sleep(0.02)
"""


class Job:
    """A job of two nodes with one rank each; `failures` is how often the script first fails."""

    def __init__(self, place: Place, policy: str, *options: str, failures: int = 0) -> None:
        self.place = place
        (place.folder / "policy.yaml").write_text(policy)
        options = ("--nnodes", "2", "--policy", "policy.yaml", *options)
        program = ("--no-python", sys.executable, "-u", place.script(COUNTS), str(failures))
        self.run: Run = place.start(*options, *program)

    def until_counted(self, count: int) -> None:
        """Wait until `count` processes have run the script."""
        wait_until(lambda: len(self.counted()) >= count, f"{count} processes{self.run.story()}")

    def counted(self) -> list[tuple[int, int, int]]:
        """Return (rank, placed, started) of each process that ran the script, by rank."""
        path = self.place.folder / "counts"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = (line.split() for line in lines)
        return sorted((int(rank), int(placed), int(started)) for rank, placed, started in whole)

    def hosts_of(self, node: int) -> list[str]:
        """Return the hosts of a node, in order."""
        return [e.host for e in self.run.events_of(journal.NodeJoined) if e.node == node]

    def break_host(self, node: int) -> str:
        """Break the current host of a node."""
        host = self.hosts_of(node)[-1]
        file = self.place.home / names.HOSTS_DIRECTORY / host
        set_condition(file, SimulatedCondition(broken=True))
        return host

    def end(self, status: int) -> None:
        """Let the ranks end."""
        (self.place.folder / "go").touch()
        self.run.end(status)

    def shell(self, *words: str) -> str:
        """Run another command of rekindle; return its output."""
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setenv(names.ENV_HOME, str(self.place.home))
            patch.chdir(self.place.folder)
            with pytest.raises(SystemExit) as ended:
                cli.main([*words])
        assert ended.value.code == 0
        return printed.getvalue()


def test_a_job_is_placed_again_as_often_as_it_may(place: Place) -> None:
    """Each reschedule fills all places again and starts the script once in each.

    At the limit the job fails, and the reason has the number of reschedules.
    """
    job = Job(place, "{strategies: [reschedule-job], max_reschedules: 2}", failures=5)
    job.run.end(1)
    decided = [event.strategy for event in job.run.events_of(journal.Decided)]
    assert decided == [Strategy.RESCHEDULE_JOB, Strategy.RESCHEDULE_JOB, Strategy.FAIL]
    assert job.counted() == [(rank, placed, 1) for rank in (0, 1) for placed in (1, 2, 3)]
    ends = [event.outcome for event in job.run.events_of(journal.Ended)]
    assert ends == ["rescheduled", "rescheduled", "failed"]
    assert "2 of 2 reschedules are used" in job.run.events_of(journal.Decided)[-1].reason


PLACED = """
strategies: [reschedule-pod, reschedule-job-isolated]
max_pod_reschedules: 2
max_reschedules: 1
"""


def a_broken_host_is_left_and_not_used_again(job: Job) -> None:
    """One node moves to another host; the other node keeps its host."""
    job.until_counted(2)
    before = job.hosts_of(0)
    job.break_host(1)
    job.until_counted(4)
    assert job.hosts_of(0) == before
    assert len(job.hosts_of(1)) == len({*job.hosts_of(1)}) == 2
    assert job.counted() == [(0, 1, 1), (0, 1, 2), (1, 1, 1), (1, 2, 1)]


def trouble_can_be_reported_from_the_shell(job: Job) -> None:
    """After a monitor reports an XID, the node leaves the host."""
    job.shell("report-fault", "job", "--node", "1", "--source", "xid", "79")
    job.until_counted(6)
    assert len(job.hosts_of(1)) == len({*job.hosts_of(1)}) == 3
    assert (job.place.home / "hosts.jsonl").exists()


def a_job_is_placed_again_without_the_lost_host(job: Job) -> None:
    """The lost host is isolated for all jobs, until a user releases it."""
    before = len(job.hosts_of(0)), len(job.hosts_of(1))
    sick = job.break_host(1)
    job.until_counted(8)
    job.end(0)
    assert sick not in job.hosts_of(0)[before[0] :] + job.hosts_of(1)[before[1] :]
    assert [e.host for e in job.run.events_of(journal.Isolated)][-1] == sick
    assert sick in [node["host"] for node in json.loads(job.shell("nodes", "--json"))]
    assert HostLog(job.place.home).hosts()[sick].isolated
    job.shell("release-node", sick)
    assert not HostLog(job.place.home).hosts()[sick].isolated


ACTS = [
    a_broken_host_is_left_and_not_used_again,
    trouble_can_be_reported_from_the_shell,
    a_job_is_placed_again_without_the_lost_host,
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[acts.Played]:
    """Run one job that leaves three hosts."""
    with Place(tmp_path_factory.mktemp("placed") / "place") as place:
        yield acts.Played(ACTS, Job(place, PLACED))


@pytest.mark.parametrize("act", acts.names(ACTS))
def test_a_host_is_left(played: acts.Played, act: str) -> None:
    """Each act has the result that its function states."""
    played.check(act)


OWN_TABLE = """
[[exit]]
codes = [3]
kind = "host-out-of-memory"
says = "our scripts say so when memory runs short"
"""


@pytest.mark.parametrize("granted", [True, False])
def test_a_person_is_asked_first(place: Place, granted: bool) -> None:
    """`rekindle status` shows the decision that waits; `rekindle approve` answers it.

    A policy file without `max_restarts` allows restarts, as a policy in a form does.
    A restart in place raises MA_PROC_START_CNT, and not MA_SCHEDULE_CNT. The user's own table has
    the text for an exit status, and the reason has that text.
    """
    (place.folder / "own.toml").write_text(OWN_TABLE)
    asks = "{strategies: [restart], approve: [restart], max_hangs_in_row: 2}"
    job = Job(place, asks, "--fault-tables", "own.toml", failures=1)
    run = job.run
    wait_until(lambda: any(d.approval for d in run.events_of(journal.Decided)), "the question")
    assert "our scripts say so when memory runs short" in run.events_of(journal.Decided)[0].reason
    assert "waits for your approval of restart" in job.shell("status", "job")
    assert "policy.yaml: max_hangs_in_row has no effect" in run.stderr
    job.shell("approve", "job", *(() if granted else ("--deny",)))
    run.end(0 if granted else 1)
    starts = (1, 2) if granted else (1,)
    assert job.counted() == [(rank, 1, started) for rank in (0, 1) for started in starts]
    assert "restart" in job.shell("incidents", "job")
    assert ("succeeded" if granted else "failed") in job.shell("status", "job")


def test_a_log_of_hosts_that_cannot_be_written_stops_nothing(place: Place) -> None:
    """The launcher names the unusable file; training continues until a user stops it.

    The user needs only the job's secret.
    """
    job = Job(place, "{}")
    job.until_counted(2)
    (place.home / "hosts.jsonl").mkdir()
    job.shell("report-fault", "job", "--node", "1", "--device", "0", "--source", "xid", "63")
    job.run.wait_event(journal.Isolated)
    ranks = {process.pid for process in job.run.forked()}
    wait_until(lambda: "Rekindle cannot write" in job.run.stderr, "the message")
    assert "a new coordinator replaces it" not in job.run.stderr
    assert {process.pid for process in job.run.forked()} == ranks
    job.shell("stop", "job")
    job.run.end(1)
    assert job.run.events_of(journal.Ended)[-1].outcome == "stopped"
    assert " ERROR launcher: the job was stopped" in job.run.stderr
    assert "the job failed" not in job.run.stderr
