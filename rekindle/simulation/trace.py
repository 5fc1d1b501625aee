"""Draw a trace from a mix and a seed: the time and the node of each fault.

The trace does not depend on the decisions about faults. Therefore one trace can test two policies.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rekindle.recovery.faults.fault import FaultKind
from rekindle.simulation.fault_mix import FaultRow, Mix

DAY_S = 86_400.0


class Cause(str, enum.Enum):
    """Name the change that prevents a fault from recurring."""

    NOTHING = "nothing"
    PLACE = "place"
    SCRIPT = "script"


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a fault that occurs at `at` seconds on a device of some nodes.

    `of_lemon` means that the node has the fault because it is a lemon; its replacement is not one.
    `seed` determines all other random choices about the fault. `second` is a share and a fault that
    occurs after that share of the recovery.
    """

    at: float
    row: FaultRow
    cause: Cause
    nodes: tuple[int, ...]
    device: int
    seed: int
    of_lemon: bool = False
    second: tuple[float, Strike] | None = None


def draw(
    mix: Mix, *, nodes: int, per_node: int, seconds: float, seed: Sequence[int]
) -> list[Strike]:
    """Draw the faults of this number of seconds, the earliest first.

    Gaps are exponential: the number of faults has a Poisson distribution, and the times are
    uniform.
    """
    chance = np.random.default_rng(list(seed))
    count = int(chance.poisson(mix.rate(nodes * per_node) * seconds))
    at = np.sort(chance.uniform(0.0, seconds, count))
    lemons = chance.permutation(nodes)[: round(mix.odds.lemon_share * nodes)]
    place = _Place(nodes, per_node, lemons)
    first = _draw(mix, at, place, chance)
    second = _draw(mix, np.zeros(count), place, chance)
    has_second = chance.random(count) < mix.odds.second_share
    part = chance.random(count)
    return [
        msgspec.structs.replace(strike, second=(float(part[n]), second[n]))
        if has_second[n]
        else strike
        for n, strike in enumerate(first)
    ]


class _Place(msgspec.Struct):
    """Describe the nodes that faults hit."""

    nodes: int
    per_node: int
    lemons: npt.NDArray[np.int64]


def _draw(
    mix: Mix, at: npt.NDArray[np.float64], place: _Place, chance: np.random.Generator
) -> list[Strike]:
    odds, count, nodes, lemons = mix.odds, len(at), place.nodes, place.lemons
    weights = np.array([row.weight for row in mix.faults])
    rows = chance.choice(len(mix.faults), count, p=weights / weights.sum())
    causes = chance.random(count)
    devices = chance.integers(place.per_node, size=count)
    groups = chance.random(count) < odds.group_share
    seeds = chance.integers(2**63, size=count)
    # A lemon has the share of any node and an additional share. The total rate stays that of the
    # mix.
    surplus = len(lemons) * (odds.lemon_factor - 1)
    of_lemon = chance.random(count) < surplus / (nodes + surplus)
    victims = chance.integers(nodes, size=count)
    if len(lemons):
        victims = np.where(of_lemon, chance.choice(lemons, count), victims)
    switch = FaultRow(
        name="switch", weight=1.0, kind=FaultKind.NODE_LOST, repair_s=odds.group_repair_s
    )
    found = []
    for n in range(count):
        row = switch if groups[n] else mix.faults[rows[n]]
        victim = int(victims[n])
        found.append(
            Strike(
                at=float(at[n]),
                row=row,
                cause=_cause(row, float(causes[n])),
                nodes=_group(victim, nodes, odds.group_nodes) if groups[n] else (victim,),
                device=int(devices[n]),
                seed=int(seeds[n]),
                of_lemon=bool(of_lemon[n] and not groups[n]),
            )
        )
    return found


def _cause(row: FaultRow, drawn: float) -> Cause:
    if drawn < row.place:
        return Cause.PLACE
    return Cause.SCRIPT if drawn < row.place + row.script else Cause.NOTHING


def _group(victim: int, nodes: int, size: int) -> tuple[int, ...]:
    """Return the nodes of the victim's switch."""
    first = victim - victim % size
    return tuple(range(first, min(first + size, nodes)))
