"""When a rank's state is kept: snapshots for its agent, some of them written as checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rekindle import names
from rekindle.checkpoints.state_files import METADATA_METRICS, METADATA_POSITION
from rekindle.errors import CheckpointError
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.profiler import Profiler
from rekindle.rank.rank_place import Place
from rekindle.rank.snapshot_writer import SnapshotWriter

REST_S = 600.0  # once the agent had no memory: others may have given some back by then


class StateKeeper:
    """Takes the snapshots that are due after a step; without an agent, none."""

    def __init__(
        self,
        channel: Channel | None,
        place: Place,
        profiler: Profiler,
        writer: Callable[[Channel, Place], SnapshotWriter],
    ) -> None:
        self._profiler = profiler
        self._channel = channel
        self._writer = writer(channel, place) if channel else None
        # Replicas hold the same state: one of each node keeps it, one of all has it written. Which
        # others of a node hold the same shard is not known here.
        snapshot_every = rank_environment.number(names.ENV_SNAPSHOT_EVERY)
        keeps = rank_environment.number("LOCAL_RANK") == 0 or place.shard is not None
        self._snapshot_every = snapshot_every if keeps else 0
        self._keeps = snapshot_every > 0
        self._missed_checkpoint = False
        self._rests_until = 0.0
        self._checkpointed = 0  # the step of the newest

    def keep(
        self,
        named: Mapping[str, Any],
        *,
        place: Place,
        step: int,
        last: bool,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Take a snapshot of the state after `step` finished steps, if one is due.

        last: training ends with it. position: where the next step's data begin. metrics: what the
        last of them has logged.
        """
        if self._writer is None or self._channel is None:
            return
        every = self._channel.settings.checkpoint_every
        if step < self._checkpointed:
            self._checkpointed = 0  # training has gone back: what comes is another state
        checkpoint = place.writes and (
            self._missed_checkpoint or _is_due(step, every) or (last and every > 0)
        )
        if last and step == self._checkpointed:
            return  # the script has left its loop early, after a step whose checkpoint was due
        if not checkpoint and not _is_due(step, self._snapshot_every):
            return
        if not last and time.monotonic() < self._rests_until:
            return
        began = time.time_ns()
        try:
            taken = self._writer.take(
                named,
                place=place,
                step=step,
                notes={METADATA_POSITION: position, METADATA_METRICS: metrics},
                checkpoint=checkpoint,
                wait=last and checkpoint,
            )
        except CheckpointError:
            # The agent has no memory for it, and has said so: training goes on without.
            self.close()
            self._rests_until = time.monotonic() + REST_S
            self._missed_checkpoint = False
            return
        if taken:
            self._profiler.saved(began)
        self._missed_checkpoint = checkpoint and not taken
        if checkpoint and taken:
            self._checkpointed = step

    def keep_last(
        self,
        named: Mapping[str, Any],
        *,
        place: Place,
        step: int,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
        holds: Callable[[], bool],
    ) -> bool:
        """Take a snapshot of what may be lost with this process, if any are taken at all.

        place: in the generation that did the last of the steps. holds: whether the state is still
        that of this step. By a rank that keeps none else, too. False: there is no snapshot.
        """
        if self._writer is None or not self._keeps:
            return True  # nobody wants one
        notes = {METADATA_POSITION: position, METADATA_METRICS: metrics}
        self._writer.outlast(holds)
        try:
            return self._writer.take(
                named, place=place, step=step, notes=notes, checkpoint=False, wait=False
            )
        except CheckpointError:  # the agent has no memory for it, and has said so
            return False

    def close(self) -> None:
        """Let go of the buffers; the agent keeps what they hold."""
        if self._writer is not None:
            self._writer.close()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
