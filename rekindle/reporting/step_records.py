"""Read the step records that ranks append to their metrics files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from rekindle import names

_FILE = re.compile(r"rank(\d+)\.jsonl")
_WHOLE = 8 << 20  # bytes; a picture uses only a sample of a longer file
_SAMPLES = 4000


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank. `at` is seconds since the epoch; the script logged `metrics`."""

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
    """Read a sample of the first ranks' records, evenly spread over the job, for a picture."""
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
            file.readline()  # most likely the rest of an earlier line
            lines.append(file.readline())
    return b"".join(lines)


def _decode(content: bytes) -> list[StepRecord]:
    """Decode complete lines.

    The function skips a line that is incomplete because its rank was killed. The step of that line
    was not finished; the rank that repeats the step records it again.
    """
    records = []
    for line in content.splitlines():
        try:
            records.append(_DECODER.decode(line))
        except msgspec.DecodeError:
            continue
    return records


def effective(records: list[StepRecord]) -> dict[int, StepRecord]:
    """Return the valid record of each step: for a repeated step, that of its last generation."""
    found: dict[int, StepRecord] = {}
    for record in records:
        before = found.get(record.step)
        if before is None or before.generation <= record.generation:
            found[record.step] = record
    return dict(sorted(found.items()))
