"""Unlisted codes in reports: the verdict follows from their severity and origin."""

from __future__ import annotations

import argparse

import msgspec
import pytest
from jobs.driver import Driver, tables
from jobs.trained import trained

from rekindle.cli.options import HEALTH_EVENT, add
from rekindle.errors import UsageError
from rekindle.recovery.faults.classification import EventSource, HealthEvent, verdict_of
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity, Urgency
from rekindle.recovery.journal import journal


def report(job: Driver, **fields: object) -> None:
    """Report an Ascend code."""
    assert (
        job.machine.health.on_health_event(
            HealthEvent(source=EventSource.ASCEND, **{"node": 1} | fields), job.now
        )
        == ""
    )
    job.collect()


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({"what": "03000099"}, ""),  # a code of NodeD
        ({"what": "03000099", "device": 0, "origin": FaultOrigin.NODE}, ""),
        ({"what": "80FF0001", "device": 0, "severity": Severity.NOTICE}, "NotHandleFault"),
        ({"what": "80FF0001", "device": 0, "severity": Severity.MINOR}, "RestartNPU"),
        ({"what": "80FF0001", "device": 0, "severity": Severity.MAJOR}, "RestartNPU"),
        ({"what": "80FF0001", "device": 0, "severity": Severity.CRITICAL}, "SeparateNPU"),
        ({"what": "80FF0001", "device": 0}, "SeparateNPU"),
        ({"what": "80FF0001", "origin": FaultOrigin.CHIP}, "SeparateNPU"),
        ({"what": "81FF0001", "device": 0, "origin": FaultOrigin.NETWORK}, "PreSeparateNPU"),
    ],
)
def test_an_unlisted_code_is_judged_by_the_document(fields: dict[str, object], level: str) -> None:
    """An unlisted code is judged by its severity and origin, also after encoding for the wire."""
    given = HealthEvent(source=EventSource.ASCEND, node=1, **fields)
    sent = msgspec.json.decode(msgspec.json.encode(given), type=HealthEvent)
    verdict = verdict_of(tables(), sent)
    assert (verdict.level, verdict.listed) == (level, False)


def test_only_what_is_grave_takes_the_host_out() -> None:
    """A code of a node's board and a notice of a chip change nothing.

    A code of a port isolates the host, without a decision.
    """
    job = trained(5, nodes=2)
    report(job, what="03000099")
    report(job, what="80FF0001", device=0, severity=Severity.NOTICE)
    assert {each.urgency for each in job.recorded(journal.HealthEventSeen)} == {Urgency.NONE}
    assert job.recorded(journal.Isolated) == job.recorded(journal.Decided) == []
    report(job, what="81FF0001", device=0, origin=FaultOrigin.NETWORK)
    assert [event.host for event in job.recorded(journal.Isolated)] == ["host-2"]
    assert job.recorded(journal.Decided) == []


def test_severity_and_origin_are_of_ascend_codes() -> None:
    """An XID with a severity is refused."""
    event = HealthEvent(source=EventSource.XID, what="79", node=0, severity=Severity.MINOR)
    with pytest.raises(UsageError, match="only to Ascend codes, and '79' is not one"):
        verdict_of(tables(), event)


def test_the_command_line_takes_both() -> None:
    """The command line accepts the documented names of severity and origin."""
    parser = argparse.ArgumentParser()
    add(parser, HEALTH_EVENT)
    line = "--node 1 --source ascend --severity minor --origin network 80FF0001"
    options = parser.parse_args(line.split())
    assert (options.severity, options.origin) == ("minor", "network")
