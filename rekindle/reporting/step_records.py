"""The step records that ranks append to their metrics files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from rekindle import names

_FILE = re.compile(r"rank(\d+)\.jsonl")
_WHOLE = 8 << 20  # bytes; of a longer file only a sample is read for a picture
_SAMPLES = 4000


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank; `at` is seconds since the epoch, `metrics` what the script logged."""

    step: int
    generation: int
    rank: int
    at: float
    metrics: dict[str, Any] = {}


_DECODER = msgspec.json.Decoder(StepRecord)


def read_records(directory: Path) -> dict[int, list[StepRecord]]:
    """Read all records of each rank of the job in this directory, in the order written."""
    return {rank: _decode(path.read_bytes()) for rank, path in _files(directory)}


def sample_records(directory: Path, *, ranks: int) -> dict[int, list[StepRecord]]:
    """Read of the first ranks as many records as a picture shows, evenly spread over the job."""
    files = [(rank, path) for rank, path in _files(directory) if rank < ranks]
    return {rank: _decode(_sample(path)) for rank, path in files}


def _files(directory: Path) -> list[tuple[int, Path]]:
    files = (directory / names.METRICS_DIRECTORY).glob("*.jsonl")
    found = [(match[1], path) for path in files if (match := _FILE.fullmatch(path.name))]
    return sorted((int(rank), path) for rank, path in found)


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    if size <= _WHOLE:
        return path.read_bytes()
    lines = []
    with path.open("rb") as file:
        for offset in range(0, size, size // _SAMPLES):
            file.seek(offset)
            file.readline()  # most likely the end of a line that began before
            lines.append(file.readline())
    return b"".join(lines)


def _decode(content: bytes) -> list[StepRecord]:
    """Decode whole lines.

    A line that its rank was killed in the middle of is left out: the step it tells of was not
    finished, and is recorded again by whoever does it.
    """
    records = []
    for line in content.splitlines():
        try:
            records.append(_DECODER.decode(line))
        except msgspec.DecodeError:
            continue
    return records


def effective(records: list[StepRecord]) -> dict[int, StepRecord]:
    """Return the record of each step that counts: the last generation's, if it was done again."""
    found: dict[int, StepRecord] = {}
    for record in records:
        before = found.get(record.step)
        if before is None or before.generation <= record.generation:
            found[record.step] = record
    return dict(sorted(found.items()))
