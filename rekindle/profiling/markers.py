"""Records of where a rank's time goes: TaskD's format, one JSON object a line. Pure.

A range is two records of the same Id, its start and its end. Those of communication bear what the
collective is in their name, as JSON. Source: the writer of TaskD 7.1 (taskd/go), its fields and
flags as MSPTI has them; times are nanoseconds since the epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

MARKER = 1  # Kind; TaskD also writes kernels (2) and calls of the driver (3)
START, END = 2, 4  # Flag, of ranges by the host's clock
START_DEVICE, END_DEVICE = 16, 32  # and by a device's
HOST = 0  # SourceKind; 1: a device
DEFAULT, COMMUNICATION = "default", "communication"  # Domain
STEP, FORWARD, DATA_LOADER, SAVE = "step", "forward", "dataloader", "save_checkpoint"

# Nothing larger can be told to the coordinator, nor counted with: such a line is no marker.
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ProcessThread(msgspec.Struct, frozen=True, rename="pascal"):
    """Who ran it."""

    process_id: _Number = 0
    thread_id: _Number = 0


class DeviceStream(msgspec.Struct, frozen=True, rename="pascal"):
    """Where it ran."""

    device_id: _Number = 0
    stream_id: _Number = 0


class Place(msgspec.Struct, frozen=True, rename="pascal"):
    """Where a record comes from."""

    pt: ProcessThread = ProcessThread()
    ds: DeviceStream = DeviceStream()


class Marker(msgspec.Struct, frozen=True, rename="pascal"):
    """One record. source_kind: 0 of the host, 1 of a device."""

    kind: _Number
    flag: _Number
    source_kind: _Number
    timestamp: _Time
    id: _Number
    mspti_object_id: Place
    name: str
    domain: str = DEFAULT


class Operation(msgspec.Struct, frozen=True, rename="camel"):
    """What a collective is: the name of its records, as JSON. count: elements."""

    stream_id: str
    count: str
    data_type: str
    op_name: str
    group_name: str


class Range(msgspec.Struct, frozen=True):
    """Something that a rank has done. start, end: nanoseconds since the epoch."""

    name: str
    domain: str
    start: int
    end: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9

    @property
    def step(self) -> int:
        """The number of a step's range; -1: it is none."""
        return step_of(self.name)


def step_of(name: str) -> int:
    """Return the number of the step that a range of this name is; -1: it is none."""
    kind, _, number = name.partition(" ")
    is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
    return int(number) if kind == STEP and is_number else -1


# What reading a line may raise: no JSON, no UTF-8, or arrays in arrays without end.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
MOST_DIGITS = 18

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Marker)
_OPERATION = msgspec.json.Decoder(Operation)


class Encoder:
    """Writes the ranges of one thread of a process. device: the rank's own, by its number."""

    def __init__(self, process_id: int, device: int) -> None:
        self._process, self._device = process_id, device
        self._next = 1

    def lines(self, made: Range, thread_id: int) -> bytes:
        """Return the two records of a range, each with its newline."""
        number, begin = self.begin(made.name, made.domain, made.start, thread_id)
        return begin + self.end(number, made.name, made.domain, made.end, thread_id)

    def begin(self, name: str, domain: str, at: int, thread_id: int) -> tuple[int, bytes]:
        """Return the first record of a range that has not ended yet, and the range's Id."""
        number, self._next = self._next, self._next + 1
        return number, self._line(START, at, number, name, domain, thread_id)

    def end(self, number: int, name: str, domain: str, at: int, thread_id: int) -> bytes:
        """Return its second record."""
        return self._line(END, at, number, name, domain, thread_id)

    def _line(self, flag: int, at: int, number: int, name: str, domain: str, thread: int) -> bytes:
        place = Place(ProcessThread(self._process, thread), DeviceStream(self._device))
        return _ENCODER.encode(Marker(MARKER, flag, 0, at, number, place, name, domain)) + b"\n"


def operation_name(operation: Operation) -> str:
    """Return the name of a collective's records."""
    return _ENCODER.encode(operation).decode()


def operation_of(name: str) -> Operation | None:
    """Return what a range of communication is, by its name; None: it does not say."""
    try:
        return _OPERATION.decode(name)
    except UNREADABLE:
        return None


_BY_TWO = ("send", "recv", "receive")  # in whatever spelling: isend, HcclReceive, HcclBatchSendRecv


@functools.lru_cache(4096)
def group_of(name: str) -> str:
    """Return the group all of whose ranks join in this; empty: it is of two alone, or unknown."""
    operation = operation_of(name)
    if operation is None or any(word in operation.op_name.casefold() for word in _BY_TWO):
        return ""
    return operation.group_name


def marks(lines: Iterable[bytes]) -> Iterator[Marker]:
    """Read records; what is none is passed over: kernels, calls, what is torn or beyond bounds."""
    for line in lines:
        try:
            marker = _DECODER.decode(line)
        except UNREADABLE:
            continue
        if marker.kind == MARKER:
            yield marker


class Ranges:
    """Reads the records of a rank as they come.

    A range whose start is not there, or whose end never comes or was before it, is none. Where
    device and host tell of one range, the host's counts, or the device's if that is over before the
    host has begun to tell. Of a collective both count: the host's may be no more than the call.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, int], Marker] = {}
        self._told: dict[int, Marker] = {}  # by Id, the newest

    def read(self, marks: Iterable[Marker]) -> Iterator[Range]:
        """Give each range as it ends."""
        for marker in marks:
            key = (marker.id, marker.domain, marker.source_kind)
            if marker.flag in (START, START_DEVICE):
                self._open[key] = marker
            elif marker.flag in (END, END_DEVICE) and key in self._open:
                begun = self._open.pop(key)
                if marker.timestamp < begun.timestamp:  # somebody has set the clock
                    continue
                if begun.domain == COMMUNICATION or not self._is_told(begun):
                    yield Range(begun.name, begun.domain, begun.timestamp, marker.timestamp)

    def _is_told(self, begun: Marker) -> bool:
        """Whether the other of device and host tells of this range; else it is told herewith."""
        other = self._told.pop(begun.id, None)
        if begun.source_kind != HOST:
            other = self._open.get((begun.id, begun.domain, HOST), other)
        if other is not None and _are_one(begun, other):
            return True
        self._told[begun.id] = begun
        if len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]
        return False


_MOST_TOLD = 4096  # ranges by which a device may be behind


def _are_one(one: Marker, other: Marker) -> bool:
    """Whether device and host tell of the same; whoever takes a process's place uses its Ids."""
    differ = one.source_kind != other.source_kind
    return differ and (one.name, one.domain) == (other.name, other.domain)


def ranges(lines: Iterable[bytes]) -> Iterator[Range]:
    """Read all records of a rank, and give each range as it ends."""
    return Ranges().read(marks(lines))
