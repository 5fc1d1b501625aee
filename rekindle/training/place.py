"""What a rank is in the generation that it is in, as far as its state is concerned."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.runtime.protocol import Form


@dataclass(frozen=True, slots=True)
class Place:
    """slot: its number in the full world, which never changes.

    shard: which piece of the state it holds; None: all ranks hold the same. shards: how many pieces
    there are. writes: of those that hold the same, it is the one that writes checkpoints. copied:
    another node keeps copies of its snapshots.
    """

    slot: int
    shard: int | None = None
    generation: int = 0
    shards: int = 1
    writes: bool = False
    copied: bool = False

    def moved(self, form: Form) -> Place:
        """Return the place in the generation that is formed."""
        own = form.plan[self.slot]
        return Place(
            slot=self.slot,
            shard=self.shard,
            generation=form.generation,
            shards=form.shards,
            writes=own.writes,
            copied=own.keeper >= 0,
        )
