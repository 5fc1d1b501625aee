"""The ranks that did not join a collective, from the records of all ranks."""

from __future__ import annotations

import pytest

from rekindle.profiling.blocked_collectives import CollectivePosition, stuck
from rekindle.profiling.markers import (
    COMMUNICATION,
    DEFAULT,
    MARKER,
    START,
    START_DEVICE,
    Encoder,
    Marker,
    Operation,
    Place,
    ProcessThread,
    Range,
    marks,
    operation_name,
)


class Rank:
    """The records of a rank."""

    def __init__(self, process: int = 1) -> None:
        self.position = CollectivePosition()
        self._encoder = Encoder(process, 0)
        self._now = 0

    def _write(self, data: bytes) -> None:
        self._now += 10
        self.position.read(marks(data.splitlines(keepends=True)))

    def step(self, number: int) -> None:
        self._write(self._encoder.lines(Range(f"step {number}", DEFAULT, 0, self._now), 1))

    def joins(self, group: str = "dp", name: str = "all_reduce", *, ends: bool = True) -> None:
        operation = operation_name(Operation("0", "4", "float32", name, group))
        number, line = self._encoder.begin(operation, COMMUNICATION, self._now, 1)
        self._write(line)
        if ends:
            self._write(self._encoder.end(number, operation, COMMUNICATION, self._now, 1))

    def dies(self) -> None:
        """Replace the process of the rank; its Ids start again."""
        self._encoder = Encoder(2, 0)


def world(count: int = 4, steps: int = 3) -> list[Rank]:
    """Return ranks that have done some steps with two collectives."""
    ranks = [Rank() for _ in range(count)]
    for rank in ranks:
        for step in range(steps):
            rank.joins()
            rank.joins("tp")
            rank.step(step)
    return ranks


def found(ranks: list[Rank]) -> list[str]:
    return [each.in_words() for each in stuck({n: r.position for n, r in enumerate(ranks)})]


def test_nobody_waits() -> None:
    assert found(world()) == []


def test_one_did_not_join() -> None:
    """stuck() names the rank that did not join, also if profiling began at different steps."""
    ranks = world()
    ranks[0] = Rank()
    ranks[0].joins()
    ranks[0].step(2)
    for rank in ranks:
        rank.joins()
    for number in (0, 1, 3):
        ranks[number].joins(ends=False)
    assert found(ranks) == [
        "ranks 0, 1, 3 in all_reduce no. 2 of dp in step 3, which rank 2 did not join"
    ]


def test_each_group_by_itself() -> None:
    """stuck() judges each group separately, and a rank outside a group is not missing there."""
    ranks = world()
    other = Rank()
    other.joins("pp")
    other.step(2)
    ranks.append(other)
    ranks[0].joins("tp", ends=False)
    for number in (1, 2, 3):
        ranks[number].joins("dp", "broadcast", ends=False)
    assert found(ranks) == [
        "ranks 1, 2, 3 in broadcast no. 1 of dp in step 3, which rank 0 did not join",
        "rank 0 in all_reduce no. 1 of tp in step 3, which ranks 1, 2, 3 did not join",
    ]


def test_all_have_joined() -> None:
    """If all ranks joined the collective, stuck() names no rank, because the link is broken."""
    ranks = world()
    for rank in ranks:
        rank.joins(ends=False)
    assert found(ranks) == []


def test_transfers_between_two_are_none_of_all() -> None:
    ranks = world()
    ranks[0].joins(name="send", ends=False)
    ranks[1].joins(name="recv", ends=False)
    assert found(ranks) == []


def test_a_stage_waits_for_another_one_s_transfer() -> None:
    """The number of transfers of a stage is independent of the other stages."""
    ranks = world()
    for number, name in enumerate(("HcclSend", "HcclReceive", "HcclSend")):
        ranks[number].joins("pp", name)
        ranks[number].joins("pp", name, ends=False)
    assert found(ranks) == []


def test_a_device_that_begins_is_not_done() -> None:
    """A start on the device is not an end, as TaskD records a collective by both clocks."""
    ranks = world(2)
    operation = operation_name(Operation("0", "4", "float32", "HcclAllreduce", "dp"))
    for flag in (START, START_DEVICE):
        source = int(flag == START_DEVICE)
        place = Place(ProcessThread(1))
        mark = Marker(MARKER, flag, source, 10**6, 77, place, operation, COMMUNICATION)
        ranks[0].position.read([mark])
    assert found(ranks) == [
        "rank 0 in HcclAllreduce no. 1 of dp in step 3, which rank 1 did not join"
    ]


def taskd(flag: int, number: int, name: str, domain: str = COMMUNICATION) -> Marker:
    """Return a record of TaskD: of the host (flags 2, 4) or of the device (16, 32)."""
    source, place = int(flag >= START_DEVICE), Place(ProcessThread(1))
    return Marker(MARKER, flag, source, 10**6 + number, number, place, name, domain)


REDUCE = operation_name(Operation("0", "4", "float32", "HcclAllreduce", "dp"))
START_AND_END = {"host": (2, 4), "device": (16, 32)}


@pytest.mark.parametrize(
    "order",
    [
        [("host", 0), ("host", 1)],
        [("device", 0), ("device", 1)],
        [("host", 0), ("device", 0), ("host", 1), ("device", 1)],
        [("host", 0), ("host", 1), ("device", 0), ("device", 1)],
        [("device", 0), ("host", 0), ("host", 1), ("device", 1)],
    ],
    ids=str,
)
@pytest.mark.parametrize("end_domain", [COMMUNICATION, DEFAULT])
def test_four_records_are_one_range(order: list[tuple[str, int]], end_domain: str) -> None:
    """Steps and collectives count once, by both clocks or one, whatever the end's domain is."""
    ranks = [Rank(), Rank()]

    def write(rank: Rank, number: int, name: str, domain: str, *, ends: bool = True) -> None:
        for clock, end in order:
            if end and not ends:
                continue
            at = end_domain if end and domain == COMMUNICATION else domain
            flag = START_AND_END[clock][end]
            rank.position.read([taskd(flag, number, "NULL" if end else name, at)])

    for rank in ranks:
        for step in range(2):
            write(rank, 10 * step + 1, REDUCE, COMMUNICATION)
            write(rank, 10 * step + 2, f"step {step}", DEFAULT)
        write(rank, 31, REDUCE, COMMUNICATION)
    assert found(ranks) == []
    write(ranks[0], 32, REDUCE, COMMUNICATION, ends=False)
    assert found(ranks) == [
        "rank 0 in HcclAllreduce no. 2 of dp in step 2, which rank 1 did not join"
    ]


def test_the_host_goes_on_while_the_device_waits() -> None:
    """A collective of both clocks lasts until its end on the device."""
    ranks = [Rank(), Rank()]
    for rank in ranks:
        rank.position.read([taskd(flag, 1, REDUCE) for flag in (2, 16, 4, 32)])
    ranks[0].position.read([taskd(flag, 2, REDUCE) for flag in (2, 16, 4)])
    assert found(ranks) == [
        "rank 0 in HcclAllreduce no. 2 of dp in step 0, which rank 1 did not join"
    ]
    ranks[0].position.read([taskd(32, 2, "NULL")])
    assert found(ranks) == []


def test_what_a_killed_process_had_joined() -> None:
    """A collective that a killed process joined does not count for its replacement."""
    ranks = world()
    for rank in ranks:
        rank.joins(ends=False)
    ranks[2].dies()
    ranks[2].joins("tp")
    assert found(ranks) == [
        "ranks 0, 1, 3 in all_reduce no. 1 of dp in step 3, which rank 2 did not join"
    ]


def test_another_generation_begins_anew() -> None:
    """A new generation ends earlier collectives, also if their records arrive later."""
    ranks = world()
    ranks[0].joins(ends=False)
    for rank in ranks:
        rank.position.formed(10**6)
    ranks[1].joins(ends=False)
    assert found(ranks) == []
