"""Read a mix of faults, their rates and places: a shipped mix, or a user's TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.document import Entry, read
from rekindle.simulation.costs import DATA, Amount, Positive, Share, twice
from rekindle.user_file import FieldError

Shipped: TypeAlias = Literal["llama3", "rsc1", "rsc2", "byterobust"]
SHIPPED: tuple[str, ...] = get_args(Shipped)

_NEVER = (
    FaultKind.RESTORE,
    FaultKind.COORDINATOR,
    FaultKind.LAUNCH,
    FaultKind.SOURCE,
    FaultKind.REPLICAS,
    FaultKind.STORAGE,
    FaultKind.SKIPPED_STEP,
    FaultKind.PLANNED,
)  # these arise during recovery or do not disturb training


class FaultRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe a sort of fault; `weight`: its share of all faults, in any unit.

    See `recovery.faults.fault.Fault` for `kind`, `code`, `reset_helps` and `user_caused`. `place`
    is the share of these faults that end only on another node. `script` is the share that end only
    after a person has repaired the script. Such a fault recurs after each recovery that does not
    remove its cause. `becomes` is the kind of the recurring fault, if given. For example, a failed
    process reveals a failed device. `repair_s` is the time until a node that left because of this
    fault is usable again. Without `repair_s`, the time of the kind applies.
    """

    name: str
    weight: Positive
    kind: FaultKind
    code: str = ""
    reset_helps: bool = False
    user_caused: bool = False
    place: Share = 0.0
    script: Share = 0.0
    becomes: FaultKind | None = None
    repair_s: Amount | None = None

    def __post_init__(self) -> None:
        """Check that the fields do not contradict each other. Raises FieldError."""
        if self.place + self.script > 1:
            problem = "place and script are shares of the same total; their sum must be at most 1"
            raise FieldError(problem, "script")
        for name in ("kind", "becomes"):
            if getattr(self, name) in _NEVER:
                problem = (
                    "a mix cannot contain this kind, because Rekindle produces it during recovery"
                )
                raise FieldError(problem, name)


class MixRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe how often faults occur, and their irregularities.

    `per_1000_devices_per_day` counts faults of all causes, including lemons and groups. `faults_of`
    names the shipped mix that supplies the [[fault]] entries. A share `lemon_share` of the nodes
    fails `lemon_factor` times as often as others. Meta found 40 such nodes in about 3,000; the
    factor is an assumption. A share `group_share` of the faults removes `group_nodes` nodes of a
    switch together (ByteRobust), for `group_repair_s`. During a share `second_share` of the
    recoveries another fault occurs. These faults are in addition to the trace (an assumption).
    """

    source: str
    per_1000_devices_per_day: Positive
    faults_of: Shipped | None = None
    lemon_share: Share = 0.013
    lemon_factor: Annotated[float, Meta(ge=1, le=1e9, description="1 or more, at most 1e9")] = 10.0
    group_share: Share = 0.01
    group_nodes: Annotated[int, Meta(ge=1, le=10**9, description="1 or more, at most 1e9")] = 32
    group_repair_s: Amount = 7920.0  # time of a reboot: data/times.toml
    second_share: Share = 0.1


class Mix(msgspec.Struct, frozen=True):
    """Hold faults and their rate; `name` is the name that the user gave."""

    name: str
    odds: MixRow
    faults: tuple[FaultRow, ...]

    def rate(self, devices: int) -> float:
        """Return the faults per second of this number of devices."""
        return self.odds.per_1000_devices_per_day * devices / 1000 / 86_400


def load(name: str) -> Mix:
    """Read a shipped mix or a file.

    Raises UsageError: it is invalid; the message names the line.
    """
    if name in SHIPPED:
        return _read(name, DATA / f"{name}.toml")
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"--faults {name} is not a file or a mix; choose from {', '.join(SHIPPED)}, or give "
            "a file (docs/operate/simulate.md describes the format)"
        )
    return _read(name, path)


def _read(name: str, path: Path) -> Mix:
    odds: MixRow | None = None
    header: Entry | None = None
    faults: dict[str, FaultRow] = {}
    for entry in read(path):
        if entry.table == "mix":
            if header is not None:
                raise entry.error(f"line {header.line} already has a [[mix]]; keep one")
            header, odds = entry, entry.convert(MixRow)
        elif entry.table == "fault":
            row = entry.convert(FaultRow)
            if row.name in faults:
                raise twice(entry, row.name)
            faults[row.name] = row
        else:
            raise entry.error(f"unknown table [[{entry.table}]]; choose from mix, fault")
    if odds is None or header is None:
        raise UsageError(f"{path}:1: [[mix]] is missing; add it, with the rate of faults")
    if bool(faults) == bool(odds.faults_of):
        given = "both are given" if faults else "neither is given"
        raise header.error(f"give [[fault]] entries or faults_of; {given}")
    found = load(odds.faults_of).faults if odds.faults_of else tuple(faults.values())
    return Mix(name, odds, found)
