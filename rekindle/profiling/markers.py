"""Define records of where a rank's time goes: TaskD's format, one JSON object per line. Pure.

A range consists of two records with the same Id, its start and its end. The name of a communication
record describes the collective as JSON. Source: the writer of TaskD 7.1 (taskd/go), whose fields
and flags are those of MSPTI. Times are nanoseconds since the epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

MARKER = 1  # Kind; TaskD also writes kernels (2) and driver calls (3)
START, END = 2, 4  # Flag of ranges by the clock of the host
START_DEVICE, END_DEVICE = 16, 32  # Flag of ranges by the clock of a device
HOST = 0  # SourceKind; 1: a device
DEFAULT, COMMUNICATION = "default", "communication"  # Domain
STEP, FORWARD, DATA_LOADER, SAVE = "step", "forward", "dataloader", "save_checkpoint"

# Larger numbers do not fit the messages to the coordinator. A line with one is not a marker.
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

# Errors of reading a line: invalid JSON, invalid UTF-8, or too deeply nested arrays.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MOST_DIGITS = 18
_ENCODER = msgspec.json.Encoder()

# parts of isend, HcclReceive, HcclBatchSendRecv and other spellings
_BY_TWO = ("send", "recv", "receive")

_MOST_RECORDED = 4096  # ranges by which a device may lag


class ProcessThread(msgspec.Struct, frozen=True, rename="pascal"):
    """Identify the process and thread that recorded a range."""

    process_id: _Number = 0
    thread_id: _Number = 0


class DeviceStream(msgspec.Struct, frozen=True, rename="pascal"):
    """Identify the device and stream that ran a range."""

    device_id: _Number = 0
    stream_id: _Number = 0


class Place(msgspec.Struct, frozen=True, rename="pascal"):
    """Identify the source of a record."""

    pt: ProcessThread = ProcessThread()
    ds: DeviceStream = DeviceStream()


class Marker(msgspec.Struct, frozen=True, rename="pascal"):
    """Describe one record. `source_kind` is 0 for the host and 1 for a device."""

    kind: _Number
    flag: _Number
    source_kind: _Number
    timestamp: _Time
    id: _Number
    mspti_object_id: Place
    name: str
    domain: str = DEFAULT


class Operation(msgspec.Struct, frozen=True, rename="camel"):
    """Describe a collective: the name of its records, as JSON. `count` is in elements."""

    stream_id: str
    count: str
    data_type: str
    op_name: str
    group_name: str


class Range(msgspec.Struct, frozen=True):
    """Describe an activity of a rank. `start` and `end` are nanoseconds since the epoch."""

    name: str
    domain: str
    start: int
    end: int

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return (self.end - self.start) / 1e9

    @property
    def step(self) -> int:
        """Return the number of the step that this range is, or -1."""
        return step_of(self.name)


def step_of(name: str) -> int:
    """Return the number of the step that a range with this name is, or -1."""
    kind, _, number = name.partition(" ")
    is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
    return int(number) if kind == STEP and is_number else -1


_DECODER = msgspec.json.Decoder(Marker)
_OPERATION = msgspec.json.Decoder(Operation)


class Encoder:
    """Encode the ranges of one thread of a process. `device` is the number of the rank's device."""

    def __init__(self, process_id: int, device: int) -> None:
        self._process, self._device = process_id, device
        self._next = 1

    def lines(self, span: Range, thread_id: int) -> bytes:
        """Return the two records of a range, each with its newline."""
        number, begin = self.begin(span.name, span.domain, span.start, thread_id)
        return begin + self.end(number, span.name, span.domain, span.end, thread_id)

    def begin(self, name: str, domain: str, at: int, thread_id: int) -> tuple[int, bytes]:
        """Return the Id and the first record of a range that has not ended yet."""
        number, self._next = self._next, self._next + 1
        return number, self._line(START, at, number, name, domain, thread_id)

    def end(self, number: int, name: str, domain: str, at: int, thread_id: int) -> bytes:
        """Return the second record of a range."""
        return self._line(END, at, number, name, domain, thread_id)

    def _line(self, flag: int, at: int, number: int, name: str, domain: str, thread: int) -> bytes:
        place = Place(ProcessThread(self._process, thread), DeviceStream(self._device))
        return _ENCODER.encode(Marker(MARKER, flag, 0, at, number, place, name, domain)) + b"\n"


def operation_name(operation: Operation) -> str:
    """Return the name of a collective's records."""
    return _ENCODER.encode(operation).decode()


def operation_of(name: str) -> Operation | None:
    """Return the operation of a communication range from its name, or None."""
    try:
        return _OPERATION.decode(name)
    except UNREADABLE:
        return None


@functools.lru_cache(4096)
def group_of(name: str) -> str:
    """Return the group whose ranks all join; empty for a point-to-point or unknown operation."""
    operation = operation_of(name)
    if operation is None or any(word in operation.op_name.casefold() for word in _BY_TWO):
        return ""
    return operation.group_name


def marks(lines: Iterable[bytes]) -> Iterator[Marker]:
    """Parse records; skip kernels, calls, and incomplete or invalid lines."""
    for line in lines:
        try:
            marker = _DECODER.decode(line)
        except UNREADABLE:
            continue
        if marker.kind == MARKER:
            yield marker


class Ranges:
    """Combine the records of a rank into ranges as they arrive.

    The domain of an end may differ from that of its start: then the newest start with its Id and
    source counts. A range without a start, without an end, or with an end before its start does
    not. If both
    device and host record a range, the host's range counts. The device's range counts if it ends
    before the host records the start. For a collective both count, because the host's range may
    cover only the call.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, int], Marker] = {}
        self._recorded: dict[int, Marker] = {}  # the newest, by Id

    def read(self, marks: Iterable[Marker]) -> Iterator[Range]:
        """Yield each range when it ends."""
        for marker in marks:
            key = (marker.id, marker.domain, marker.source_kind)
            if marker.flag in (START, START_DEVICE):
                self._open[key] = marker
            elif marker.flag in (END, END_DEVICE) and (begun := self._begun(key)) is not None:
                if marker.timestamp < begun.timestamp:  # an administrator has set the clock
                    continue
                if begun.domain == COMMUNICATION or not self._is_recorded(begun):
                    yield Range(begun.name, begun.domain, begun.timestamp, marker.timestamp)

    def _begun(self, key: tuple[int, str, int]) -> Marker | None:
        """Remove and return the start of the range that ends."""
        if key in self._open:
            return self._open.pop(key)
        alike = (other for other in self._open if (other[0], other[2]) == (key[0], key[2]))
        found = max(alike, key=lambda other: self._open[other].timestamp, default=None)
        return self._open.pop(found) if found else None

    def _is_recorded(self, begun: Marker) -> bool:
        """Return whether the other source recorded this range; otherwise mark it as recorded."""
        other = self._recorded.pop(begun.id, None)
        if begun.source_kind != HOST:
            other = self._open.get((begun.id, begun.domain, HOST), other)
        if other is not None and _are_one(begun, other):
            return True
        self._recorded[begun.id] = begun
        if len(self._recorded) > _MOST_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        return False


def _are_one(one: Marker, other: Marker) -> bool:
    """Return whether device and host recorded the same range.

    The name and domain must match, because a replacement process uses the same Ids.
    """
    differ = one.source_kind != other.source_kind
    return differ and (one.name, one.domain) == (other.name, other.domain)


def ranges(lines: Iterable[bytes]) -> Iterator[Range]:
    """Read all records of a rank, and yield each range when it ends."""
    return Ranges().read(marks(lines))
