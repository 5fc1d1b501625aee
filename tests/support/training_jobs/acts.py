"""Acts on a job whose ranks all pause (see `training_jobs.rows.paused`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from rekindle.recovery.journal import journal
from training_jobs.job import Job


def kill(*ranks: int) -> Callable[[Job], None]:
    """Return an act that kills these ranks."""
    return lambda job: job.kill(*ranks)


def end(job: Job) -> None:
    """End a job, as a platform does before it shuts a machine down."""
    os.kill(job.coordinator.pid, signal.SIGTERM)


def lose(
    *nodes: int, checkpoint: int = 0, copies: int = 0, also: int = -1
) -> Callable[[Job], None]:
    """Return an act that kills these nodes.

    It waits for the checkpoint of step `checkpoint`, and for all copies of step `copies`. It kills
    the rank `also` of another node at the same time.
    """

    def act(job: Job) -> None:
        if checkpoint:
            job.wait_event(journal.Checkpointed, step=checkpoint)
        if copies:
            job.wait_copies(copies, *range(job.record.ranks))
        if also >= 0:
            job.kill(also)
        job.kill_node(*nodes)

    return act


def lose_and_end(*nodes: int, **awaited: int) -> Callable[[Job], None]:
    """Return an act that kills these nodes and ends the job before new nodes join (see `lose`)."""

    def act(job: Job) -> None:
        lose(*nodes, **awaited)(job)
        end(job)

    return act
