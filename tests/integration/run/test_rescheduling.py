"""A job on pretended hosts is placed anew: whole, or one node of it; real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Place, Run, wait_until

from rekindle.engines.host_log import HostLog
from rekindle.engines.pretended import PretendedHosts
from rekindle.recovery import journal
from rekindle.recovery.policy import Strategy
from rekindle.runtime.pretended_host import Condition

# Says how often its place was filled and how often it was started there; then it fails as often as
# it is told to, or waits until the test lets it go.
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


def policy(place: Place, text: str) -> tuple[str, str]:
    path = place.folder / "policy.yaml"
    path.write_text(text)
    return "--policy", str(path)


def counted(place: Place) -> list[tuple[int, int, int]]:
    """(rank, placed, started) of every process that ran the script, in order of rank."""
    lines = [line.split() for line in (place.folder / "counts").read_text().splitlines()]
    return sorted((int(rank), int(placed), int(started)) for rank, placed, started in lines)


def hosts_of(run: Run) -> dict[int, list[str]]:
    """The hosts that each node was on, in order."""
    found: dict[int, list[str]] = {}
    for event in run.recorded(journal.NodeJoined):
        found.setdefault(event.node, []).append(event.host)
    return found


def waiting(place: Place, *options: str, nodes: int = 2) -> Run:
    """Start a job whose ranks wait for `go`."""
    script = place.script(COUNTS)
    arguments = ("--no-python", sys.executable, "-u", script, "0")
    run = place.start("--nnodes", str(nodes), *options, *arguments)
    wait_until(lambda: counts_lines(place) >= nodes, "all ranks")
    return run


def counts_lines(place: Place) -> int:
    path = place.folder / "counts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_job_is_placed_anew_as_often_as_it_may(place: Place) -> None:
    """Each time all its places are filled again; in each the script is started once."""
    options = policy(place, "{strategies: [reschedule-job], max_reschedules: 2}")
    script = place.script(COUNTS)
    arguments = ("--no-python", sys.executable, "-u", script, "2")
    run = place.start("--nnodes", "2", *options, *arguments).end(0)
    assert [event.strategy for event in run.recorded(journal.Decided)] == [
        Strategy.RESCHEDULE_JOB
    ] * 2
    expected = [(rank, placed, 1) for rank in (0, 1) for placed in (1, 2, 3)]
    assert counted(place) == expected
    assert [event.outcome for event in run.recorded(journal.Ended)] == [
        "rescheduled",
        "rescheduled",
        "succeeded",
    ]


def test_a_job_that_fails_once_too_often_fails(place: Place) -> None:
    """The reason says how often it was placed anew."""
    options = policy(place, "{strategies: [reschedule-job], max_reschedules: 1}")
    arguments = ("--no-python", sys.executable, "-u", place.script(COUNTS), "5")
    run = place.start("--nnodes", "2", *options, *arguments).end(1)
    assert "1 of 1 reschedules are used" in run.recorded(journal.Decided)[-1].reason


def test_a_restart_in_place_counts_starts_and_no_placement(place: Place) -> None:
    """MA_PROC_START_CNT rises, MA_SCHEDULE_CNT does not."""
    options = policy(place, "{strategies: [restart], max_restarts: 1}")
    arguments = ("--no-python", sys.executable, "-u", place.script(COUNTS), "1")
    place.start("--nnodes", "2", *options, *arguments).end(0)
    assert counted(place) == [(0, 1, 1), (0, 1, 2), (1, 1, 1), (1, 1, 2)]


POD = "{strategies: [reschedule-pod], max_pod_reschedules: 1, max_reschedules: 1}"


def test_a_broken_host_is_left_and_not_used_again(place: Place) -> None:
    """One node is placed anew, on another host; the other stays where it is."""
    run = waiting(place, *policy(place, POD))
    hosts = PretendedHosts(place.home)
    before = hosts_of(run)
    hosts.set_condition(before[1][0], Condition(broken=True))
    wait_until(lambda: counts_lines(place) == 4, "the restart of all ranks")
    (place.folder / "go").touch()
    run.end(0)
    after = hosts_of(run)
    assert after[0] == before[0]
    assert len(after[1]) == 2
    assert len(set(after[1])) == 2
    assert counted(place) == [(0, 1, 1), (0, 1, 2), (1, 1, 1), (1, 2, 1)]


ISOLATED = "{strategies: [reschedule-job-isolated], max_reschedules: 1}"


def test_a_job_is_placed_anew_without_the_lost_host(place: Place) -> None:
    """The host is isolated for all jobs, until a person releases it."""
    run = waiting(place, *policy(place, ISOLATED))
    sick = hosts_of(run)[1][0]
    PretendedHosts(place.home).set_condition(sick, Condition(broken=True))
    wait_until(lambda: counts_lines(place) == 4, "the second placing")
    (place.folder / "go").touch()
    run.end(0)
    assert sick not in [host for hosts in hosts_of(run).values() for host in hosts[1:]]
    assert [event.host for event in run.recorded(journal.Isolated)] == [sick]
    assert shell(place, "nodes", "--json")[0]["host"] == sick
    assert HostLog(place.home).hosts()[sick].isolated
    shell(place, "release-node", sick)
    assert not HostLog(place.home).hosts()[sick].isolated


def shell(place: Place, *words: str) -> object:
    """Run another command of rekindle; return what it printed, read as JSON if it is."""
    command = [sys.executable, "-m", "rekindle.cli", *words]
    done = subprocess.run(
        command,
        env=place.environment(),
        cwd=place.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "--json" in words else done.stdout


@pytest.mark.parametrize("granted", [True, False])
def test_a_person_is_asked_first(place: Place, granted: bool) -> None:
    """From the shell: status says what waits, approve answers it."""
    asks = "{strategies: [restart], max_restarts: 1, approve: [restart]}"
    options = policy(place, asks)
    arguments = ("--no-python", sys.executable, "-u", place.script(COUNTS), "1")
    run = place.start("--nnodes", "2", *options, *arguments)
    wait_until(lambda: any(d.approval for d in run.recorded(journal.Decided)), "the question")
    assert "waits for your approval of restart" in str(shell(place, "status", run.job_id))
    shell(place, "approve", run.job_id, *(() if granted else ("--deny",)))
    run.end(0 if granted else 1)
    assert counts_lines(place) == (4 if granted else 2)
    assert "restart" in str(shell(place, "incidents", run.job_id))
    outcome = "succeeded" if granted else "failed"
    assert outcome in str(shell(place, "status", run.job_id))


def test_trouble_can_be_reported_from_the_shell(place: Place) -> None:
    """A monitor tells of an XID: the host is left."""
    run = waiting(place, *policy(place, POD))
    shell(place, "report-fault", run.job_id, "--node", "1", "--source", "xid", "79")
    wait_until(lambda: counts_lines(place) == 4, "the restart of all ranks")
    (place.folder / "go").touch()
    run.end(0)
    assert len(set(hosts_of(run)[1])) == 2
    assert Path(place.home, "hosts.jsonl").exists()


def test_a_job_can_be_stopped_from_the_shell(place: Place) -> None:
    """By anybody who may read the job's secret."""
    run = waiting(place)
    shell(place, "stop", run.job_id)
    run.end(1)
    assert run.recorded(journal.Ended)[-1].outcome == "stopped"


def test_a_log_of_hosts_that_cannot_be_written_stops_nothing(place: Place) -> None:
    """It is said; training goes on."""
    run = waiting(place)
    (place.home / "hosts.jsonl").mkdir()
    shell(
        place, "report-fault", run.job_id, "--node", "1", "--device", "0", "--source", "xid", "63"
    )
    run.wait_for(journal.Isolated)
    (place.folder / "go").touch()
    run.end(0)
    assert "hosts.jsonl cannot be written" in run.stderr
    assert "another one takes its place" not in run.stderr


OWN_TABLE = """
[[exit]]
codes = [3]
kind = "host-out-of-memory"
says = "our scripts say so when memory runs short"
"""


def test_a_file_of_the_users_own_says_what_an_exit_means(place: Place) -> None:
    """Its words are in the reason."""
    (place.folder / "own.toml").write_text(OWN_TABLE)
    arguments = ("--no-python", sys.executable, "-u", place.script(COUNTS), "5")
    run = place.start("--nnodes", "2", "--fault-tables", "own.toml", *arguments).end(1)
    assert "our scripts say so when memory runs short" in run.recorded(journal.Decided)[0].reason


def test_a_bad_entry_is_refused_before_anything_runs(place: Place) -> None:
    """With file and line."""
    (place.folder / "own.toml").write_text(OWN_TABLE.replace("host-out-of-memory", "bad luck"))
    run = place.start("--fault-tables", "own.toml", place.script(COUNTS)).end(2)
    assert "own.toml:4: " in run.stderr
    assert run.events() == []
