"""What a rank is in the generation that it is in, as far as its state is concerned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rekindle.protocol.agent import Form


@dataclass(frozen=True, slots=True)
class Place:
    """slot: its number in the full world, which never changes.

    shard: which piece of the state it holds; None: all ranks hold the same. shards: how many pieces
    there are. writes: of those that hold the same, it is the one that writes checkpoints. copied:
    another node keeps copies of its snapshots. mesh: the device mesh that tells which pieces they
    are, sizes by the names of its dimensions; None: nothing but the script knows.
    """

    slot: int
    shard: int | None = None
    generation: int = 0
    shards: int = 1
    writes: bool = False
    copied: bool = False
    mesh: Mapping[str, int] | None = None

    def moved(self, form: Form) -> Place:
        """Return the place in the generation that is formed."""
        own = form.plan[self.slot]
        return replace(
            self,
            generation=form.generation,
            shards=form.shards,
            writes=own.writes,
            copied=own.keeper >= 0,
        )
