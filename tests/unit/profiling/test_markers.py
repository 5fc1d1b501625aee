"""Records in TaskD's format: a reader that uses only the seed's description reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.profiling.markers import (
    COMMUNICATION,
    DEFAULT,
    HOST,
    MARKER,
    Encoder,
    Marker,
    Operation,
    Place,
    Range,
    Ranges,
    group_of,
    operation_name,
    operation_of,
    ranges,
)

SECOND = 1_000_000_000

# As TaskD writes: a step (device clock), a collective (host clock), a kernel, a call.
TASKD = Path(__file__).with_name("taskd.jsonl").read_bytes()


def read_as_the_seed_says(text: bytes) -> list[dict[str, Any]]:
    """Return one JSON object for each line, without other assumptions."""
    return [json.loads(line) for line in text.decode().splitlines()]


def test_ours_are_one_object_a_line_with_the_seeds_fields() -> None:
    made = Range("step 3", DEFAULT, 5 * SECOND, 7 * SECOND)
    begin, end = read_as_the_seed_says(Encoder(77, 1).lines(made, 88))
    assert begin == {
        "Kind": 1,
        "Flag": 2,
        "SourceKind": 0,
        "Timestamp": 5 * SECOND,
        "Id": 1,
        "MsptiObjectId": {
            "Pt": {"ProcessId": 77, "ThreadId": 88},
            "Ds": {"DeviceId": 1, "StreamId": 0},
        },
        "Name": "step 3",
        "Domain": "default",
    }
    assert end == begin | {"Flag": 4, "Timestamp": 7 * SECOND}


def test_each_range_has_a_number_of_its_own() -> None:
    encoder = Encoder(1, 0)
    text = b"".join(encoder.lines(Range("forward", DEFAULT, n, n + 1), 1) for n in range(3))
    numbers = [record["Id"] for record in read_as_the_seed_says(text)]
    assert numbers == [1, 1, 2, 2, 3, 3]


def test_taskds_own_are_read() -> None:
    found = list(ranges(TASKD.splitlines(keepends=True)))
    collective, step = found
    assert (step.name, step.step, step.seconds) == ("step 12", 12, 2.0)
    assert collective.domain == COMMUNICATION
    operation = operation_of(collective.name)
    assert operation == Operation("3", "1024", "float32", "HcclAllreduce", "group-1")
    assert abs(collective.seconds - 0.1) < 1e-9


def test_what_was_written_is_read_again() -> None:
    name = operation_name(Operation("0", "4", "float32", "all_reduce", "default"))
    made = [
        Range("step 0", DEFAULT, 1, 9),
        Range("dataloader", DEFAULT, 2, 3),
        Range(name, COMMUNICATION, 4, 5),
    ]
    encoder = Encoder(1, 0)
    text = b"".join(encoder.lines(each, 1) for each in made)
    assert list(ranges(text.splitlines())) == made


def test_what_is_torn_strange_or_without_an_end_is_passed_over() -> None:
    lines = Encoder(1, 0).lines(Range("forward", DEFAULT, 1, 2), 1).splitlines()
    text = [
        b"",
        b"{",
        b"[1]",
        b"\xff",
        lines[0][:50],
        lines[0],
        b'{"Kind":"x"}',
        lines[1],
        lines[0],
    ]
    assert list(ranges(text)) == [Range("forward", DEFAULT, 1, 2)]
    assert list(ranges([lines[1]])) == []
    assert operation_of("not JSON") is None
    assert Range("step x", DEFAULT, 1, 2).step == Range("stepping", DEFAULT, 1, 2).step == -1


def marker(
    flag: int, at: int, name: str = "forward", domain: str = DEFAULT, number: int = 1
) -> Marker:
    """Return a record of the host (flags 2, 4) or of a device (16, 32)."""
    return Marker(MARKER, flag, HOST if flag < 16 else 1, at, number, Place(), name, domain)


@pytest.mark.parametrize(
    ("order", "who"),
    [
        ((2, 16, 4, 32), "host"),
        ((2, 4, 16, 32), "host"),
        ((2, 16, 32, 4), "host"),
        ((16, 2, 32, 4), "host"),
        ((16, 32, 2, 4), "device"),
        ((16, 32), "device"),
    ],
)
def test_what_device_and_host_tell_of_counts_once(order: tuple[int, ...], who: str) -> None:
    """A range that host and device record counts once, also the next range.

    The host's range counts, unless the device's range ends before the host's start.
    """
    at = {2: 10, 4: 40, 16: 12, 32: 43}
    name = {2: "forward", 4: "NULL", 16: "forward", 32: "NULL"}
    wanted = (10, 40) if who == "host" else (12, 43)
    marks = [marker(flag, n + at[flag], name[flag], number=n) for n in (1, 2) for flag in order]
    found = [(each.name, each.start, each.end) for each in Ranges().read(marks)]
    assert found == [("forward", n + wanted[0], n + wanted[1]) for n in (1, 2)]


def test_an_end_may_have_another_domain() -> None:
    """The end of mstx has the domain `default`, whatever the domain of its start is."""
    marks = [
        marker(2, 1, "all", COMMUNICATION, 7),
        marker(2, 2, "forward", DEFAULT, 8),
        marker(4, 3, "NULL", DEFAULT, 7),
        marker(4, 4, "NULL", "NULL", 8),
    ]
    assert list(Ranges().read(marks)) == [
        Range("all", COMMUNICATION, 1, 3),
        Range("forward", DEFAULT, 2, 4),
    ]


def test_ids_come_again_with_another_process() -> None:
    """If another process uses an Id again, its ranges count separately."""
    first = [marker(2, 1), marker(4, 2)]
    again = [marker(2, 11), marker(4, 12)]
    other = [marker(16, 21, "dataloader"), marker(32, 22, "dataloader")]
    found = [each.start for each in Ranges().read([*first, *again, *other])]
    assert found == [1, 11, 21]


def test_of_a_collective_both_count() -> None:
    """For a collective both ranges count, because the host's range may cover only the call."""
    marks = [marker(flag, flag, "x", COMMUNICATION) for flag in (2, 4, 16, 32)]
    assert [each.end for each in Ranges().read(marks)] == [4, 32]


@pytest.mark.parametrize(
    "name", ["send", "irecv", "HcclSend", "HcclReceive", "HcclRecv", "batch_isend_irecv"]
)
def test_transfers_of_two_are_no_collectives(name: str) -> None:
    """Transfers between two ranks are not collectives, in the spelling of each library."""
    assert group_of(operation_name(Operation("0", "1", "f", name, "pp"))) == ""
    assert group_of(operation_name(Operation("0", "1", "f", "HcclAllreduce", "pp"))) == "pp"
