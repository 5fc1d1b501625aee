"""Hosts across jobs: their history, the file that all jobs share, and the choice of a host."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from host_conditions import set_condition
from waiting import status_of

from rekindle.agent.devices.tools import SimulatedCondition, read_condition
from rekindle.engines.hosts import HostLog, SimulatedHosts
from rekindle.errors import JobError, UsageError
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import host_history as hosts
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.host_history import (
    HostChecked,
    HostFault,
    HostIsolated,
    HostReleased,
)
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.recovery.node_check.verdicts import Health

DAY_S = 86_400.0


def broke(host: str, at: float, job_id: str) -> HostFault:
    return HostFault(
        host=host, at=at, job_id=job_id, kind=FaultKind.NODE_LOST, message="it is gone"
    )


def isolated(host: str, at: float = 1.0) -> HostIsolated:
    return HostIsolated(host=host, at=at, by="job", reason="XID 79")


# ---- the history of a host


def test_a_release_forgives_what_was_before() -> None:
    """A release ends the isolation of a host and drops its earlier faults."""
    before = hosts.fold([broke("a", 1.0, "x"), isolated("a", 2.0)])
    assert (before["a"].isolated, before["a"].isolated_by) == ("XID 79", "job")
    after = hosts.fold(
        [broke("a", 1.0, "x"), isolated("a"), HostReleased(host="a", at=3.0, by="me")]
    )
    assert (after["a"].isolated, after["a"].faults) == ("", [])


@pytest.mark.parametrize(
    ("jobs", "days", "lemon"),
    [
        (("x", "y", "x"), 1.0, True),
        (("x", "x", "x"), 1.0, False),  # one job may itself be the cause
        (("x", "y"), 1.0, False),
        (("x", "y", "x"), 15.0, False),  # the first fault is too old when the last occurs
    ],
)
def test_a_lemon_breaks_several_jobs_within_four_weeks(
    jobs: tuple[str, ...], days: float, lemon: bool
) -> None:
    """A host with three faults in two jobs within four weeks comes last, but stays available."""
    events = [broke("a", number * days * DAY_S, job) for number, job in enumerate(jobs)]
    known = hosts.fold(events)
    now = events[-1].at
    assert known["a"].is_lemon(now) is lemon
    assert hosts.in_order(["a", "b"], known, now) == (["b", "a"] if lemon else ["a", "b"])


def test_isolated_hosts_are_left_out() -> None:
    assert hosts.in_order(["a", "b"], hosts.fold([isolated("a")]), 2.0) == ["b"]


@pytest.mark.parametrize(
    ("kind", "user_caused", "noted"),
    [
        (FaultKind.NODE_LOST, False, True),
        (FaultKind.DEVICE, False, True),
        (FaultKind.DEVICE, True, False),
        (FaultKind.PROCESS, False, False),
        (FaultKind.USER_CODE, True, False),
        (FaultKind.EVICTION, False, False),
    ],
)
def test_what_a_job_tells_of_a_host(kind: FaultKind, user_caused: bool, noted: bool) -> None:
    """Only faults of hardware that the user did not cause are recorded for a host."""
    fault = Fault(kind=kind, message="m", node=1, host="a", user_caused=user_caused)
    event = journal.FaultSeen(seq=7, at=5.0, incident=1, fault=fault)
    learned = hosts.learned_from("job", event)
    assert (learned is not None) is noted
    assert learned is None or (learned.host, learned.source, learned.at) == ("a", "job#7", 5.0)


def test_what_one_incident_tells_of_a_host_is_one_fault() -> None:
    """Several reports in one incident are one fault of the host, with the most precise code.

    A later report may explain the fault, or report that a reset failed.
    """
    memory = Fault(kind=FaultKind.DEVICE_MEMORY, message="memory", node=1, host="a")
    coded = Fault(
        kind=FaultKind.DEVICE, message="memory (80E01801)", node=1, host="a", code="80E01801"
    )
    events = [
        journal.FaultSeen(seq=number, at=float(number), incident=incident, fault=fault)
        for number, (incident, fault) in enumerate([(1, memory), (1, coded), (2, memory)])
    ]
    learned = [hosts.learned_from(job, event) for job in ("x", "y") for event in events[:2]]
    known = hosts.fold([event for event in learned if event])["a"]
    assert [(fault.job_id, fault.code) for fault in known.faults] == [
        ("x", "80E01801"),
        ("y", "80E01801"),
    ]
    assert not known.is_lemon(10.0)
    again = hosts.learned_from("y", events[2])
    assert hosts.fold([*filter(None, learned), *filter(None, [again])])["a"].is_lemon(10.0)


def test_a_condensed_log_says_the_same() -> None:
    """A condensed log gives the same hosts.

    It leaves out events before a release, repeated events and old events.
    """
    old = broke("a", 1.0, "x")
    lately = [broke("a", 30 * DAY_S + n, job) for n, job in enumerate("xyx")]
    events = [
        *(old, *lately, isolated("a", 2.0), isolated("a", 3.0)),
        *(broke("b", 2.0, "x"), isolated("b"), HostReleased(host="b", at=9.0, by="me")),
    ]
    now = 30 * DAY_S + 5
    fewer = hosts.condensed(events, now)
    assert [type(event) for event in fewer] == [HostFault] * 3 + [HostIsolated]
    before, after = hosts.fold(events), hosts.fold(fewer)
    assert set(after) == {"a"}
    assert before["b"] == hosts.Host(host="b", faults=[])
    assert before["a"].is_lemon(now)
    assert after["a"].is_lemon(now)
    assert after["a"].isolated_at == before["a"].isolated_at == 3.0
    assert hosts.condensed(fewer, now) == fewer


def checks(count: int, factor: float) -> list[HostChecked]:
    """Return checks of a host whose devices get slower with each check. Its memory does not."""
    return [
        HostChecked(
            host="a",
            at=float(number),
            health=Health.HEALTHY,
            seconds={
                Measurement.COMPUTE: factor**number,
                Measurement.MEMORY: 1.0,
                Measurement.LINK: 0.0,
            },
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [1, 20, 21, 100])
def test_what_gets_slower_bit_by_bit_is_seen(count: int) -> None:
    """A slow decline shows relative to the best measurement, even if that check is old.

    The host keeps 20 checks.
    """
    host = hosts.fold(checks(count, 1.007))["a"]
    grown = 1.007 ** (count - 1)
    assert host.drift() == pytest.approx({Measurement.COMPUTE: grown, Measurement.MEMORY: 1.0})
    assert host.checked() == ("healthy" if grown < 1.15 else f"healthy, compute {grown:.2f}x")
    assert len(host.checks) == min(count, hosts.CHECKS_KEPT)


@pytest.mark.parametrize("count", [1, 20, 21, 22, 60])
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_condensed_log_keeps_the_best_for_ever(count: int, factor: float) -> None:
    """A condensed log keeps the best measurements, also if it is condensed repeatedly.

    Otherwise it keeps only the newest checks.
    """
    events = checks(count, factor)
    kept: list[hosts.AnyHostEvent] = []
    for event in events:
        kept = hosts.condensed([*kept, event], now=1e9)
    assert kept == hosts.condensed(events, now=1e9) == hosts.condensed(kept, now=1e9)
    assert hosts.fold(kept) == hosts.fold(events)
    assert len(kept) <= hosts.CHECKS_KEPT + len(Measurement)


# ---- the file


def test_what_was_learned_from_one_event_is_noted_once(tmp_path: Path) -> None:
    """An event that a restarted flow reports again is recorded once."""
    log = HostLog(tmp_path)
    event = HostIsolated(host="a", at=1.0, source="job#7", by="job", reason="r")
    for _ in range(2):
        log.append(event)
    assert len((tmp_path / "hosts.jsonl").read_bytes().splitlines()) == 1
    assert HostLog(tmp_path).hosts()["a"].isolated == "r"
    later = HostIsolated(host="a", at=2.0, source="job#7", by="job", reason="again")
    log.append(later)  # another job with the same name
    assert log.hosts()["a"].isolated == "again"


def test_a_line_that_was_torn_is_cut_off(tmp_path: Path) -> None:
    """A partial last line of a killed writer is ignored, and later lines stay readable."""
    log = HostLog(tmp_path)
    log.append(isolated("a"))
    path = tmp_path / "hosts.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type":"isolated","host":"b"')
    assert set(log.hosts()) == {"a"}
    log.append(isolated("c"))
    assert set(log.hosts()) == {"a", "c"}


def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    """A damaged line raises an error with its number, because it may have isolated a host."""
    (tmp_path / "hosts.jsonl").write_bytes(b"nonsense\n" * 2)
    with pytest.raises(JobError, match=r"hosts\.jsonl.*line 1"):
        HostLog(tmp_path).hosts()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """If the file cannot be written, HostLog raises JobError, and the job continues.

    The follower of the job prints the error.
    """
    (tmp_path / "hosts.jsonl").mkdir()
    with pytest.raises(JobError, match=r"hosts\.jsonl"):
        HostLog(tmp_path).append(isolated("a"))


WRITER = """
import sys
from pathlib import Path
from rekindle.engines.hosts import HostLog
from rekindle.recovery.journal.host_history import HostIsolated
for number in range(20):
    name = f"{sys.argv[2]}-{number}"
    event = HostIsolated(host=name, at=1.0, by="job", reason="XID 79", source=name)
    HostLog(Path(sys.argv[1])).append(event)
"""


@pytest.mark.process
def test_any_number_of_processes_write_it(tmp_path: Path) -> None:
    """Several processes write the file without a lost or partial line."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), f"w{number}"])
        for number in range(3)
    ]
    assert [status_of(writer) for writer in writers] == [0, 0, 0]
    assert len(HostLog(tmp_path).hosts()) == 60


# ---- simulated hosts


def test_a_host_has_one_agent_at_a_time(tmp_path: Path) -> None:
    """A host belongs to the process that holds its file open. Closing the file releases the host.

    The end of the process also closes the file.
    """
    pool = SimulatedHosts(tmp_path, limit=2)
    first, handle = pool.take({})
    second, other = pool.take({})
    assert (first.name, second.name) == ("local-0", "local-1")
    with pytest.raises(JobError, match="none of 2 hosts is free"):
        pool.take({})
    os.close(handle)
    again, handle = pool.take({})
    assert again.name == "local-0"
    for each in (handle, other):
        os.close(each)


def test_isolated_simulated_hosts_are_not_taken(tmp_path: Path) -> None:
    """An isolated host is not used. A job that needs more hosts than remain is refused."""
    pool = SimulatedHosts(tmp_path, limit=2)
    known = hosts.fold([isolated("local-0")])
    taken, handle = pool.take(known)
    os.close(handle)
    assert taken.name == "local-1"
    pool.require(1, known)
    with pytest.raises(UsageError, match="needs 2 hosts, but only 1 of 2 are not isolated"):
        pool.require(2, known)


@pytest.mark.process
def test_a_broken_host_kills_what_is_on_it_alone(tmp_path: Path) -> None:
    """A broken host kills only its own agent, which has the host's file open."""
    pool = SimulatedHosts(tmp_path, limit=2)
    agents = []
    for _ in range(2):
        _, handle = pool.take({})
        agents.append(
            os.posix_spawn(
                "/bin/sleep",
                ["sleep", "600"],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, handle, 9)],
            )
        )
        os.close(handle)
    first = tmp_path / "hosts" / "local-0"
    set_condition(first, SimulatedCondition(broken=True))
    assert os.waitstatus_to_exitcode(os.waitpid(agents[0], 0)[1]) == -9
    assert os.waitpid(agents[1], os.WNOHANG) == (0, 0)
    os.kill(agents[1], 9)
    os.waitpid(agents[1], 0)
    assert read_condition(first).broken
    set_condition(first, SimulatedCondition())
    assert not read_condition(first).broken


def test_a_lock_outlives_whoever_took_it(tmp_path: Path) -> None:
    """The lock belongs to the open file, so an agent that inherits it keeps the host.

    The launcher passes the open file to the agent.
    """
    _, handle = SimulatedHosts(tmp_path, limit=1).take({})
    inherited = os.dup(handle)
    os.close(handle)
    with (tmp_path / "hosts" / "local-0").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(inherited)
