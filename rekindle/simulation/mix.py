"""Which faults strike, how often and where: a mix, shipped or in a user's TOML file."""

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


class FaultRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sort of fault; `weight`: how many of all, in any unit.

    kind, code, reset_helps, user_caused: as in `recovery.faults.fault.Fault`. place: share of them
    that pass only on another node; script: share that pass only once a person has mended the
    script. Such a fault comes again after every recovery that leaves its cause alone, then as a
    fault of the kind `becomes`, if that is given: a dead process may turn out to be a dead device.
    repair_s: until a node that was left because of it can be used again, if not as for its kind.
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
        """Refuse contradictions. Raises FieldError."""
        if self.place + self.script > 1:
            problem = "place and script are shares of one whole; give at most 1 in all"
            raise FieldError(problem, "script")
        for name in ("kind", "becomes"):
            if getattr(self, name) in _NEVER:
                problem = "no mix can tell of these: Rekindle makes them while it recovers"
                raise FieldError(problem, name)


_NEVER = (
    FaultKind.RESTORE,
    FaultKind.COORDINATOR,
    FaultKind.LAUNCH,
    FaultKind.STORAGE,
)  # or do not disturb training


class MixRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often faults strike, and what is odd about them.

    per_1000_devices_per_day: all causes, lemons and groups included. faults_of: a shipped mix, of
    which the [[fault]] entries are taken. lemon_share of the nodes fail lemon_factor times as often
    as others (Meta found 40 in about 3,000; the factor is assumed). group_share of the faults take
    group_nodes nodes at once, those of a switch (ByteRobust), for group_repair_s. second_share of
    the recoveries are struck by another fault besides those that happen to come (assumed).
    """

    source: str
    per_1000_devices_per_day: Positive
    faults_of: Shipped | None = None
    lemon_share: Share = 0.013
    lemon_factor: Annotated[float, Meta(ge=1, le=1e9, description="1 or more, at most 1e9")] = 10.0
    group_share: Share = 0.01
    group_nodes: Annotated[int, Meta(ge=1, le=10**9, description="1 or more, at most 1e9")] = 32
    group_repair_s: Amount = 7920.0  # what a reboot takes: data/times.toml
    second_share: Share = 0.1


class Mix(msgspec.Struct, frozen=True):
    """Faults and their rate; `name` is what the user called it by."""

    name: str
    odds: MixRow
    faults: tuple[FaultRow, ...]

    def rate(self, devices: int) -> float:
        """Return the faults per second of so many devices."""
        return self.odds.per_1000_devices_per_day * devices / 1000 / 86_400


def load(name: str) -> Mix:
    """Read a shipped mix, or a file. Raises UsageError: it cannot be used; it says the line."""
    if name in SHIPPED:
        return _read(name, DATA / f"{name}.toml")
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"--faults {name}: there is no such file, and no such mix; choose of "
            f"{', '.join(SHIPPED)}, or give a file (docs/operate/simulate.md says what is in it)"
        )
    return _read(name, path)


def _read(name: str, path: Path) -> Mix:
    odds: MixRow | None = None
    header: Entry | None = None
    faults: dict[str, FaultRow] = {}
    for entry in read(path):
        if entry.table == "mix":
            if header is not None:
                raise entry.error(f"there is a [[mix]] in line {header.line} already; keep one")
            header, odds = entry, entry.convert(MixRow)
        elif entry.table == "fault":
            row = entry.convert(FaultRow)
            if row.name in faults:
                raise twice(entry, row.name)
            faults[row.name] = row
        else:
            raise entry.error(f"unknown table [[{entry.table}]]; choose of mix, fault")
    if odds is None or header is None:
        raise UsageError(f"{path}:1: [[mix]] is missing; it says how often faults strike")
    if bool(faults) == bool(odds.faults_of):
        given = "both are given" if faults else "neither is given"
        raise header.error(f"give [[fault]] entries or faults_of; {given}")
    found = load(odds.faults_of).faults if odds.faults_of else tuple(faults.values())
    return Mix(name, odds, found)
