"""Records in TaskD's format: an independent reader, written from the seed alone, reads ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rekindle.profiling.markers import (
    COMMUNICATION,
    DEFAULT,
    Encoder,
    Operation,
    Range,
    operation_name,
    operation_of,
    ranges,
)

SECOND = 1_000_000_000

# As TaskD's own are: a step by the device's clock, a collective by the host's, a kernel, a call.
TASKD = Path(__file__).with_name("taskd.jsonl").read_bytes()


def read_as_the_seed_says(text: bytes) -> list[dict[str, Any]]:
    """One JSON object a line: nothing else is known of it."""
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
