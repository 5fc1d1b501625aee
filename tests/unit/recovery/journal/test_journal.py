"""The journal: events are encoded without loss, and incidents follow from the events."""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import JobError
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

KINDS = sorted(get_args(journal.AnyEvent), key=lambda kind: kind.__name__)
NAMED = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
    NoneType: st.none(),
}


def any_of(kind: type) -> st.SearchStrategy[Any]:
    """Return a strategy for instances of a structure with values for every field."""
    return st.builds(kind, **{name: value(of) for name, of in get_type_hints(kind).items()})


def value(of: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotation that JSON can represent."""
    if of in NAMED:
        return NAMED[of]
    if isinstance(of, UnionType):
        return st.one_of([value(each) for each in get_args(of)])
    if get_origin(of) is dict:
        keys, values = get_args(of)
        return st.dictionaries(value(keys), value(values), max_size=3)
    if of == tuple[int, ...]:
        return st.lists(NAMED[int], max_size=4).map(tuple)
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        return any_of(of)
    return st.from_type(of)


events = st.one_of([any_of(kind) for kind in KINDS])


def killed(rank: int = 1, **more: Any) -> Fault:
    return Fault(kind=FaultKind.PROCESS, message=f"rank {rank} was ended", rank=rank, **more)


def story() -> list[journal.Event]:
    """Return a job with a recovered incident, an incident of storage, and an open incident."""
    raised = Fault(kind=FaultKind.USER_CODE, message="rank 0 raised", rank=0, at=29.0)
    events: list[journal.Event] = [
        journal.JobStarted(job_id="j", attempt=0, nodes=1, processes_per_node=2, pid=1),
        journal.Formed(generation=1, world_size=2, step=0, sources={"fresh": 2}, newest=0),
        journal.FirstStep(generation=1, step=1),
        journal.FaultSeen(incident=1, fault=killed(at=10.0)),
        journal.FaultSeen(incident=1, fault=killed(0, at=9.0)),
        journal.Decided(
            incident=1,
            strategy=Strategy.RECOVER_IN_PLACE,
            reason="because",
            fault=killed(0, at=9.0),
        ),
        journal.Formed(
            generation=2, world_size=2, step=7, sources={"snapshot": 2}, newest=9, incident=1
        ),
        journal.Restored(generation=2, incident=1),
        journal.FirstStep(generation=2, step=8, incident=1),
        journal.CheckpointFailed(incident=2, fault=Fault(kind=FaultKind.STORAGE, message="full")),
        journal.FaultSeen(incident=3, fault=raised),
        journal.Decided(
            incident=3, strategy=Strategy.FAIL, reason="no strategy is left", fault=raised
        ),
        journal.Ended(outcome="failed", reason="no strategy is left", finished=8),
    ]
    return [
        msgspec.structs.replace(event, seq=number, at=100.0 + number)
        for number, event in enumerate(events, start=1)
    ]


@given(events)
def test_an_event_survives_its_line(event: journal.Event) -> None:
    """An event is equal after encoding and decoding, and its line has no line break."""
    line = journal.encode(event)
    assert b"\n" not in line
    assert journal.decode(line) == event


def test_every_event_has_a_readable_type_of_its_own() -> None:
    """Each kind of event has its own type name, which other programs may rely on."""
    assert set(journal.Event.__subclasses__()) == set(KINDS)
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    for event in story():
        assert json.loads(journal.encode(event))["type"] in tags


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"type":"no-such-event"}', '{"type":"ended"}'])
def test_a_line_that_is_no_event_is_an_error(line: str) -> None:
    """A line that is not an event raises an error."""
    with pytest.raises(msgspec.DecodeError):
        journal.decode(line)


def test_a_field_of_a_later_version_is_passed_over() -> None:
    """An unknown field is ignored, so a journal of a newer Rekindle stays readable."""
    line = b'{"type":"stopping","reason":"later","why":"new"}'
    assert journal.decode(line) == journal.Stopping(reason="later")


@given(st.lists(events, min_size=1, max_size=4), st.data())
def test_a_torn_last_line_is_left_out(recorded: list[journal.Event], data: st.DataObject) -> None:
    """If the last line is partial, all events before it are read."""
    lines = [journal.encode(event) + b"\n" for event in recorded]
    cut = data.draw(st.integers(0, len(lines[-1]) - 2))
    torn = b"".join(lines[:-1]) + lines[-1][:cut]
    assert journal.read(torn.splitlines()) == recorded[:-1]


def test_a_broken_line_in_the_middle_is_an_error() -> None:
    """A damaged line before the last one is an error with its number."""
    lines = [journal.encode(event) for event in story()]
    with pytest.raises(JobError, match="line 4"):
        journal.read([*lines[:3], lines[3][:10], *lines[4:]])


def test_an_empty_journal_has_no_events() -> None:
    """An empty journal has no events and no incidents."""
    assert journal.read([]) == []
    assert journal.incidents([]) == []


def test_incidents_are_folded_from_the_events() -> None:
    """Each incident has its faults, decisions, times, lost steps and sources."""
    first, storage, last = journal.incidents(story())
    assert (first.number, first.closed, first.strategy) == (1, True, Strategy.RECOVER_IN_PLACE)
    assert [fault.rank for fault in first.faults] == [1, 0]
    assert first.cause.rank == 0
    times = (first.detected, first.decided, first.regrouped, first.restored, first.first_step)
    assert times == (104.0, 106.0, 107.0, 108.0, 109.0)
    assert (first.resumed_at, first.steps_lost, first.generation) == (7, 2, 2)
    assert first.sources == {"snapshot": 2}
    assert (storage.closed, storage.cause.kind) == (True, FaultKind.STORAGE)
    assert "training continues" in storage.reason
    assert (last.closed, last.strategy, last.reason) == (False, Strategy.FAIL, story()[-1].reason)


def formed(
    step: int, *, newest: int = 0, incident: int = 0, source: str = "self"
) -> journal.Formed:
    """Return a new generation of one rank."""
    return journal.Formed(
        generation=1,
        world_size=1,
        step=step,
        newest=newest,
        incident=incident,
        sources={source: 1},
    )


LOST = {
    "a script without a Session restarts": (
        [
            formed(0, incident=1, source="script"),
            journal.FirstStep(generation=1, step=0, incident=1),
        ],
        None,
    ),
    "a rank fails before it reaches its Session": (
        [formed(0, incident=1, source="script"), formed(0, source="fresh")],
        0,
    ),
    "a coordinator takes over during the restart": (
        [formed(0, incident=1, source="script"), formed(45, newest=47)],
        2,
    ),
    "the next attempt repeats steps": (
        [journal.Ended(outcome="failed", reason="", finished=46), formed(45, source="checkpoint")],
        1,
    ),
    "the attempt ended, and no other has begun": (
        [journal.Ended(outcome="failed", reason="", finished=46)],
        None,
    ),
    "another incident ends it": (
        [formed(0, incident=1, source="script"), formed(5, newest=9, incident=2)],
        0,
    ),
}


@pytest.mark.parametrize(("later", "lost"), LOST.values(), ids=LOST)
def test_the_lost_steps_of_an_incident(later: list[journal.Event], lost: int | None) -> None:
    """The lost steps are known when a generation with Sessions has formed, in any attempt."""
    fault_seen = journal.FaultSeen(incident=1, fault=killed(at=10.0))
    first, *_ = journal.incidents([fault_seen, *later])
    assert first.steps_lost == lost


def test_a_second_recovery_in_one_incident_replaces_the_first() -> None:
    """After a fault during recovery, the incident shows the last generation that formed."""
    events = story()[:7]
    again = msgspec.structs.replace(events[-1], generation=3, step=6, seq=8, at=120.0)
    [incident] = journal.incidents([*events, again])
    assert (incident.generation, incident.resumed_at, incident.steps_lost) == (3, 6, 3)
    assert incident.regrouped == 120.0


@given(st.lists(events, max_size=12))
def test_any_journal_can_be_folded(recorded: list[journal.Event]) -> None:
    """Each incident occurs once and in order, for any events."""
    numbers = [incident.number for incident in journal.incidents(recorded)]
    assert numbers == sorted(set(numbers))
    assert 0 not in numbers


@given(st.lists(events, max_size=8), st.integers(0, 8))
def test_a_fold_is_over_the_events_alone(recorded: list[journal.Event], cut: int) -> None:
    """A journal that is written and read gives the same incidents."""
    lines = [journal.encode(event) for event in recorded]
    assert journal.incidents(journal.read(lines)) == journal.incidents(recorded)
    journal.incidents(recorded[:cut])  # a part of a journal also gives incidents
