"""Step records: each number reaches all readers, or is an error of the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hanging import HangingFile
from waiting import wait_until

from rekindle import names
from rekindle.errors import ProtocolError, SessionError
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank import progress
from rekindle.rank.progress import Records, numbers_in
from rekindle.reporting.step_records import read_records

ROUND: list[Any] = []
ROUND.append(ROUND)
TOO_LARGE = (
    r"step\.log of step 7: an integer of 1329 bits is too large for a record; log it as text"
)


@pytest.mark.parametrize("huge", [10**400, -(10**400)], ids=["positive", "negative"])
@pytest.mark.parametrize("place", [lambda v: v, lambda v: [1, [v]], lambda v: {"a": (v,)}, set])
def test_a_number_without_a_float_is_an_error_of_the_script(
    huge: int, place: Callable[[Any], Any]
) -> None:
    """A record holds only numbers that its readers can hold, also in a list or a mapping."""
    page = HeartbeatPage()
    value = {huge} if place is set else place(huge)
    with pytest.raises(SessionError, match=TOO_LARGE):
        Records(None, page, 0).write(7, 1, {"tokens": value})
    assert not page.last_record()


@pytest.mark.parametrize(
    "value", [10**5000, ROUND, "\ud800", 1j], ids=["digits", "cycle", "surrogate", "complex"]
)
def test_no_other_value_leaves_the_class_of_errors(value: object) -> None:
    """A value that JSON cannot hold is a SessionError, whatever its encoder raises."""
    with pytest.raises(SessionError, match=r"step\.log of step 7: "):
        Records(None, HeartbeatPage(), 0).write(7, 1, {"tokens": value})


@pytest.mark.parametrize(
    "value", [2**63, 2**64, -(2**64), 10**30, 10**308, True, 0.5], ids="{:.3g}".format
)
def test_readers_get_each_number_of_a_record(value: float, tmp_path: Path) -> None:
    """Integers of more than 64 bits reach all readers as floats: agent, coordinator, people."""
    page, path = HeartbeatPage(), tmp_path / names.METRICS_DIRECTORY / "rank0.jsonl"
    records = Records(path, page, 0)
    records.write(7, 1, {"tokens": value, "none": float("nan"), "text": "x"})
    records.close()
    assert records.numbers_of(7) == numbers_in(page.last_record()) == {"tokens": float(value)}
    beat = p.Heartbeat(finished={}, metrics=numbers_in(page.last_record()))
    assert p.decode_from_agent(p.encode(beat)) == beat
    assert msgspec.json.decode(msgspec.json.encode(beat.metrics), type=dict[str, float])
    assert read_records(tmp_path)[0][0].metrics["tokens"] == value


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[]",
        b"\0" * 9,
        b'{"metrics": [1]}',
        b'{"metrics": {"a": 1' + b"0" * 400 + b"}}",
        b'{"metrics": {"a": 1' + b"0" * 5000 + b"}}",
        b'{"metrics": {"\\ud800": 1}}',
        b'{"metrics": {"\xff": 1}}',
        b'{"metrics": {"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}}",
        b'{"metrics": {"a": 1e400}}',
        b'{"metrics": {"a": NaN}}',
    ],
    ids=lambda record: ascii(record)[:30],
)
def test_a_page_that_a_script_has_written(record: bytes) -> None:
    """The agent refuses a record that no rank writes, with one kind of error."""
    with pytest.raises(ProtocolError, match="not a step record"):
        numbers_in(record)


def test_a_file_that_hangs_delays_the_rank_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The records wait in memory, up to a limit. The file gets them when it takes data again."""
    monkeypatch.setattr(progress, "WRITE_S", 0.01)
    monkeypatch.setattr(progress, "MOST_WAITING", 1000)
    file = HangingFile(tmp_path / "metrics" / "rank0.jsonl")
    file.fill()
    records = Records(tmp_path / "metrics" / "rank0.jsonl", HeartbeatPage(), 0)
    for step in range(100):
        records.write(step, 1, {"loss": 0.5})
    lost = "the rank loses step records: the file system of the metrics does not answer"
    assert capfd.readouterr().err.count(lost) == 1
    wait_until(lambda: '"step":9,' in file.read(), "the records that waited")
    assert '"step":99,' not in file.text
    records.close()
    file.close()


def test_records_that_find_no_file_are_lost_with_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be opened does not end the rank."""
    (tmp_path / "metrics").touch()
    records = Records(tmp_path / "metrics" / "rank0.jsonl", HeartbeatPage(), 0)
    records.write(0, 1, {"loss": 0.5})
    records.close()
    assert "the rank loses step records: [Errno" in capfd.readouterr().err
