"""What recovering costs: times of strategies, kinds of fault and the job, from TOML files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.document import Entry, read
from rekindle.recovery.faults.tables.keys import InvalidKey
from rekindle.recovery.faults.tables.loading import row_of
from rekindle.recovery.policy.policy import Strategy
from rekindle.simulation.progress import Source

DATA = Path(__file__).parent / "data"
DEFAULTS = DATA / "times.toml"


class StrategyRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` that the strategy takes at so many `devices`; the other fields: data/times.toml."""

    strategy: Strategy
    devices: list[int]
    seconds: list[float]
    state: Source
    moves: bool = False
    succeeds: float = 1.0

    def check(self) -> None:
        """Refuse what cannot be meant. Raises Wrong."""
        if not self.devices or len(self.devices) != len(self.seconds):
            raise InvalidKey(
                "seconds", "give one time for each number in devices, and one at least"
            )
        for index, (before, count) in enumerate(itertools.pairwise((0, *self.devices))):
            if count <= before:
                raise InvalidKey("devices", "give numbers above 0, the smaller ones first", index)
        for index, seconds in enumerate(self.seconds):
            check_positive("seconds", seconds, index)
        if not 0 < self.succeeds <= 1:
            raise InvalidKey(
                "succeeds", f"{self.succeeds} cannot be; give more than 0 and at most 1"
            )

    def seconds_at(self, devices: int) -> float:
        """Return the time for so many devices."""
        points = list(zip(self.devices, self.seconds, strict=True))
        if devices <= points[0][0]:
            return points[0][1]
        for (low, short), (high, long) in itertools.pairwise(points):
            if devices <= high:
                return short + (long - short) * math.log(devices / low) / math.log(high / low)
        return points[-1][1]


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of fault takes: data/times.toml."""

    kind: FaultKind
    detect_s: float
    repair_s: float

    def check(self) -> None:
        """Refuse what cannot be meant. Raises Wrong."""
        check_least("detect_s", self.detect_s)
        check_least("repair_s", self.repair_s)


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the whole job; seconds. snapshot_every_s 0: no snapshots.

    overhead: share of the time that Session and snapshots take. session: as in `recovery.case`.
    """

    step_s: float = 10.0
    checkpoint_stall_s: float = 30.0
    snapshot_every_s: float = 100.0
    overhead: float = 0.0
    new_node_s: float = 120.0
    answer_s: float = 600.0
    grow_s: float = 20.0
    session: bool = True

    def check(self) -> None:
        """Refuse what cannot be meant. Raises Wrong."""
        check_positive("step_s", self.step_s)
        for name in ("checkpoint_stall_s", "snapshot_every_s", "new_node_s", "answer_s", "grow_s"):
            check_least(name, getattr(self, name))
        if not 0 <= self.overhead < 1:
            raise InvalidKey(
                "overhead", f"{self.overhead} is no share; give 0 or more, less than 1"
            )


class Costs(msgspec.Struct, frozen=True):
    """All of it, for every strategy and every kind that a mix may name."""

    strategies: Mapping[Strategy, StrategyRow]
    kinds: Mapping[FaultKind, KindRow]
    job: JobRow


def check_least(name: str, value: float) -> None:
    """Refuse what is below 0 or endless. Raises Wrong."""
    if not 0 <= value < math.inf:
        raise InvalidKey(name, f"{value} cannot be; give a number from 0 on")


def check_positive(name: str, value: float, index: int | None = None) -> None:
    """Refuse what is not above 0 or endless. Raises Wrong."""
    if not 0 < value < math.inf:
        raise InvalidKey(name, f"{value} cannot be; give a number above 0", index)


def load(user_file: Path | None = None) -> Costs:
    """Read the defaults, and what a user's file says instead.

    Raises UsageError: the file cannot be used; it says the line.
    """
    strategies: dict[Strategy, StrategyRow] = {}
    kinds: dict[FaultKind, KindRow] = {}
    job = JobRow()
    for path in (DEFAULTS, user_file):
        seen: set[object] = set()
        for entry in read(path) if path else ():
            key: object
            match entry.table:
                case "strategy":
                    row = row_of(entry, StrategyRow)
                    strategies[row.strategy] = row
                    key = row.strategy
                case "kind":
                    row = row_of(entry, KindRow)
                    kinds[row.kind] = row
                    key = row.kind
                case "job":
                    row_of(entry, JobRow)
                    job = msgspec.structs.replace(job, **entry.values)
                    key = "job"
                case other:
                    raise entry.error(f"unknown table [[{other}]]; choose of strategy, kind, job")
            if key in seen:
                raise twice(entry, key)
            seen.add(key)
    return Costs(strategies, kinds, job)


def twice(entry: Entry, key: object) -> UsageError:
    """Make the error about an entry that the file has already."""
    name = getattr(key, "value", key)
    return entry.error(f"there is an entry for '{name}' in this file already; keep one")
