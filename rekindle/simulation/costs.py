"""Read the costs of recovery from TOML files: times of strategies, kinds of fault and the job."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.document import Entry, read
from rekindle.recovery.policy.policy import Strategy
from rekindle.simulation.progress import Source
from rekindle.user_file import FieldError

DATA = Path(__file__).parent / "data"
DEFAULTS = DATA / "times.toml"

Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e9, description="0 or more, at most 1e9")]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=1e9, description="more than 0, at most 1e9")]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1, description="a share, from 0 to 1")]


class StrategyRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State the `seconds` of a strategy for each number of `devices`.

    data/times.toml describes the other fields.
    """

    strategy: Strategy
    devices: Annotated[list[int], Meta(min_length=1)]
    seconds: list[Positive]
    state: Source
    moves: bool = False
    succeeds: Annotated[float, Meta(gt=0, le=1, description="more than 0 and at most 1")] = 1.0

    def __post_init__(self) -> None:
        """Check that the fields do not contradict each other. Raises FieldError."""
        if len(self.devices) != len(self.seconds):
            raise FieldError("give one time for each number in devices", "seconds")
        for index, (before, count) in enumerate(itertools.pairwise((0, *self.devices))):
            if count <= before:
                raise FieldError("give numbers above 0, the smaller ones first", "devices", index)

    def seconds_at(self, devices: int) -> float:
        """Return the time for a number of devices, by interpolation over its logarithm."""
        points = list(zip(self.devices, self.seconds, strict=True))
        if devices <= points[0][0]:
            return points[0][1]
        for (low, short), (high, long) in itertools.pairwise(points):
            if devices <= high:
                return short + (long - short) * math.log(devices / low) / math.log(high / low)
        return points[-1][1]


class KindRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State the times of a kind of fault; data/times.toml describes the fields."""

    kind: FaultKind
    detect_s: Amount
    repair_s: Amount


class JobRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State the settings of the whole job, in seconds.

    `snapshot_every_s` 0 means that the job takes no snapshots. `overhead` is the share of the time
    that Session and snapshots take. `session` is as in `recovery.policy.history.Situation`.
    """

    step_s: Positive = 10.0
    checkpoint_stall_s: Amount = 30.0
    snapshot_every_s: Amount = 100.0
    overhead: Annotated[float, Meta(ge=0, lt=1, description="0 or more, less than 1")] = 0.0
    new_node_s: Amount = 120.0
    answer_s: Amount = 600.0
    grow_s: Amount = 20.0
    session: bool = True


class Costs(msgspec.Struct, frozen=True):
    """Hold the costs for every strategy and every kind of fault that a mix may name."""

    strategies: Mapping[Strategy, StrategyRow]
    kinds: Mapping[FaultKind, KindRow]
    job: JobRow


def load(user_file: Path | None = None) -> Costs:
    """Read the defaults, and override them with the entries of a user's file.

    Raises UsageError: a file is invalid; the message names the line.
    """
    strategies: dict[Strategy, StrategyRow] = {}
    kinds: dict[FaultKind, KindRow] = {}
    job = JobRow()
    for path in (DEFAULTS, user_file):
        keys: set[object] = set()
        for entry in read(path) if path else ():
            key: Strategy | FaultKind | str
            match entry.table:
                case "strategy":
                    strategy = entry.convert(StrategyRow)
                    key = strategy.strategy
                    strategies[key] = strategy
                case "kind":
                    kind = entry.convert(KindRow)
                    key = kind.kind
                    kinds[key] = kind
                case "job":
                    entry.convert(JobRow)
                    job = msgspec.structs.replace(job, **entry.values)
                    key = "job"
                case other:
                    raise entry.error(f"unknown table [[{other}]]; choose from strategy, kind, job")
            if key in keys:
                raise twice(entry, key)
            keys.add(key)
    return Costs(strategies, kinds, job)


def twice(entry: Entry, key: object) -> UsageError:
    """Return the error about an entry that repeats an earlier entry of the file."""
    name = getattr(key, "value", key)
    return entry.error(f"this file already has an entry for '{name}'; keep one")
