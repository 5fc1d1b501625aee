"""Sharded checkpoints that are being written: which of their shards are in the store. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rekindle.coordinator.machine.backlog import Backlog
from rekindle.protocol.agent import Commit, PartWritten


class Assembly:
    """Collects what agents tell of the shards that they have written.

    They are given up when the next generation is formed, and when a newer checkpoint is complete.
    backlog: what is due, and not begun.
    """

    def __init__(self) -> None:
        self._generation = 0
        self.backlog = Backlog()
        # By step, generation, and whether they are last words.
        self._parts: dict[tuple[int, int, bool], dict[int, PartWritten]] = {}
        self._failed = (0, 0)

    def begin(self, generation: int) -> None:
        """Give up what earlier generations have not finished."""
        self._generation, self._parts = generation, {}
        self.backlog.begin()

    def add(self, part: PartWritten, owners: Callable[[], dict[int, list[int]]]) -> Commit | None:
        """Take note of a shard; return the order to commit when it was the last one.

        owners: the ranks that have each shard.
        """
        if part.generation < self._generation and not part.last_words:
            return None  # last words are of the generation that did their step
        parts = self._parts.setdefault((part.step, part.generation, part.last_words), {})
        parts[part.shard] = part
        if len(parts) < part.shards:
            return None
        self._parts = {
            (step, made, last_words): each
            for (step, made, last_words), each in self._parts.items()
            if step > part.step or (last_words and not part.last_words)
        }
        ranks = owners()
        in_order = [parts[shard] for shard in sorted(parts)]
        return Commit(
            step=part.step,
            generation=part.generation,
            files=tuple(
                msgspec.structs.replace(each.file, ranks=tuple(ranks.get(each.shard, ())))
                for each in in_order
                if each.file is not None
            ),
            position=in_order[0].position,
            origin=in_order[0].origin,
            metrics=in_order[0].metrics,
            seconds=max(each.seconds for each in in_order),
            stall_s=max(each.stall_s for each in in_order),
            last_words=part.last_words,
        )

    def fail(self, part: PartWritten) -> bool:
        """Give a checkpoint up, for a shard could not be written; False: that was known."""
        failed = part.generation, part.step
        known, self._failed = self._failed == failed, failed
        return not known
