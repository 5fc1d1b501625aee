"""Which faults strike, how often and where: a mix, shipped or in a user's TOML file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rekindle.errors import UsageError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.faults.tables.document import Entry, read
from rekindle.recovery.faults.tables.keys import InvalidKey
from rekindle.recovery.faults.tables.loading import row_of
from rekindle.simulation.costs import DATA, check_least, check_positive, twice

_MOST = 1e9  # of whatever a mix counts
SHIPPED = ("llama3", "rsc1", "rsc2", "byterobust")


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sort of fault; `weight`: how many of all, in any unit.

    kind, code, self_heal, user_caused: as in `recovery.fault.Fault`. place: share of them that pass
    only on another node; script: share that pass only once a person has mended the script. Such a
    fault comes again after every recovery that leaves its cause alone, then as a fault of the kind
    `becomes`, if that is given: a dead process may turn out to be a dead device. repair_s: until a
    node that was left because of it can be used again, if not as for its kind.
    """

    name: str
    weight: float
    kind: FaultKind
    code: str = ""
    self_heal: bool = False
    user_caused: bool = False
    place: float = 0.0
    script: float = 0.0
    becomes: FaultKind | None = None
    repair_s: float | None = None

    def check(self) -> None:
        """Refuse what cannot be meant. Raises Wrong."""
        check_positive("weight", self.weight)
        check_most("weight", self.weight)
        check_least("repair_s", self.repair_s or 0.0)
        for name in ("place", "script"):
            check_share(name, getattr(self, name))
        if self.place + self.script > 1:
            raise InvalidKey(
                "script", "place and script are shares of one whole; give at most 1 in all"
            )
        for name in ("kind", "becomes"):
            if getattr(self, name) in _NEVER:
                raise InvalidKey(
                    name, "no mix can tell of these: Rekindle makes them while it recovers"
                )


_NEVER = (
    FaultKind.RESTORE,
    FaultKind.COORDINATOR,
    FaultKind.LAUNCH,
    FaultKind.STORAGE,
)  # or do not disturb training


class MixRow(msgspec.Struct, frozen=True, kw_only=True):
    """How often faults strike, and what is odd about them.

    per_1000_devices_per_day: all causes, lemons and groups included. faults_of: a shipped mix, of
    which the [[fault]] entries are taken. lemon_share of the nodes fail lemon_factor times as often
    as others (Meta found 40 in about 3,000; the factor is assumed). group_share of the faults take
    group_nodes nodes at once, those of a switch (ByteRobust), for group_repair_s. second_share of
    the recoveries are struck by another fault besides those that happen to come (assumed).
    """

    source: str
    per_1000_devices_per_day: float
    faults_of: str = ""
    lemon_share: float = 0.013
    lemon_factor: float = 10.0
    group_share: float = 0.01
    group_nodes: int = 32
    group_repair_s: float = 7920.0  # what a reboot takes: data/times.toml
    second_share: float = 0.1

    def check(self) -> None:
        """Refuse what cannot be meant. Raises Wrong."""
        check_positive("per_1000_devices_per_day", self.per_1000_devices_per_day)
        for name in ("per_1000_devices_per_day", "lemon_factor", "group_nodes"):
            check_most(name, getattr(self, name))
        for name in ("lemon_share", "group_share", "second_share"):
            check_share(name, getattr(self, name))
        if not self.lemon_factor >= 1:
            raise InvalidKey("lemon_factor", f"{self.lemon_factor} cannot be; give 1 or more")
        check_least("group_repair_s", self.group_repair_s)
        if self.group_nodes < 1:
            raise InvalidKey("group_nodes", f"{self.group_nodes} cannot be; give 1 or more")
        if self.faults_of and self.faults_of not in SHIPPED:
            raise InvalidKey("faults_of", f"'{self.faults_of}' is none of {', '.join(SHIPPED)}")


class Mix(msgspec.Struct, frozen=True):
    """Faults and their rate; `name` is what the user called it by."""

    name: str
    odds: MixRow
    faults: tuple[FaultRow, ...]

    def rate(self, devices: int) -> float:
        """Return the faults per second of so many devices."""
        return self.odds.per_1000_devices_per_day * devices / 1000 / 86_400


def check_most(name: str, value: float) -> None:
    """Refuse what is more than can be counted with. Raises Wrong."""
    if not value <= _MOST:
        raise InvalidKey(name, f"{value:g} cannot be; give {_MOST:g} at most")


def check_share(name: str, value: float) -> None:
    """Refuse what is no share. Raises Wrong."""
    if not 0 <= value <= 1:
        raise InvalidKey(name, f"{value} is no share; give a number from 0 to 1")


def load(name: str) -> Mix:
    """Read a shipped mix, or a file. Raises UsageError: it cannot be used; it says the line."""
    if name in SHIPPED:
        return _read(name, DATA / f"{name}.toml")
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"--faults {name}: there is no such file, and no such mix; choose of "
            f"{', '.join(SHIPPED)}, or give a file (docs/simulate.md says what is in it)"
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
            header, odds = entry, row_of(entry, MixRow)
        elif entry.table == "fault":
            row: FaultRow = row_of(entry, FaultRow)
            if row.name in faults:
                raise twice(entry, row.name)
            faults[row.name] = row
        else:
            raise entry.error(f"unknown table [[{entry.table}]]; choose of mix, fault")
    if odds is None or header is None:
        raise UsageError(f"{path}:1: [[mix]] is missing; it says how often faults strike")
    if bool(faults) == bool(odds.faults_of):
        said = "both are given" if faults else "neither is given"
        raise header.error(f"give [[fault]] entries or faults_of; {said}")
    found = tuple(faults.values()) or load(odds.faults_of).faults
    return Mix(name, odds, found)
