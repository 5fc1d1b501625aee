"""Sharded checkpoints that are due: which one all agents write next, where the store is slow. Pure.

No rank waits for a store. What all shards are ready for is written if nothing else is; else
it waits, and is left out when a newer one is due. So all shards are of one step.
"""

from __future__ import annotations

import msgspec

from rekindle.protocol.agent import PartDue
from rekindle.recovery.policy.plan import Made


class Ready(msgspec.Struct, frozen=True):
    """A state of which all shards can be written. places: of each shard its node and its rank."""

    made: Made
    places: dict[int, tuple[int, int]]

    def shards_by_node(self) -> dict[int, dict[int, int]]:
        """Return for each node the shards that it has, each with the rank whose it is."""
        found: dict[int, dict[int, int]] = {}
        for shard, (node, rank) in sorted(self.places.items()):
            found.setdefault(node, {})[shard] = rank
        return found


class Backlog:
    """At most one checkpoint that is due, and one that is being written."""

    def __init__(self) -> None:
        self._due: dict[Made, dict[int, tuple[int, int]]] = {}  # not of all shards yet
        self._ready: Ready | None = None
        self._newest: Made = (-1, 0)
        self.under_way: Made | None = None

    def begin(self) -> None:
        """A generation begins, and checkpoints of earlier ones are no longer due."""
        self._due, self._ready, self.under_way = {}, None, None
        self._newest = (-1, 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way or to be."""
        return self.under_way is None and self._ready is None

    def add(self, node: int, part: PartDue) -> Made | None:
        """Note that a node can write a shard; return what is left out because of that."""
        made = part.step, part.generation
        if made <= self._newest:
            return None  # the others were ready for a newer one before
        places = self._due.setdefault(made, {})
        places[part.shard] = node, part.rank
        if len(places) < part.shards:
            return None
        left_out = self._ready.made if self._ready else None
        self._newest, self._ready = made, Ready(made, places)
        self._due = {each: places for each, places in self._due.items() if each > made}
        return left_out

    def next(self) -> Ready | None:
        """Return what is to be written now, if there is something and nothing is under way."""
        if self.under_way is not None or self._ready is None:
            return None
        ready, self._ready = self._ready, None
        self.under_way = ready.made
        return ready

    def done(self, made: Made) -> bool:
        """The checkpoint under way is written, or will not be; False: it was another one."""
        if self.under_way != made:
            return False
        self.under_way = None
        return True
