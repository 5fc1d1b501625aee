"""What a test does to a job while all its ranks pause (see `training_jobs.scenes.paused`)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rekindle.recovery import journal
from training_jobs.job import Job


def kill(*ranks: int) -> Callable[[Job], None]:
    """Return what kills these ranks."""
    return lambda job: job.kill(*ranks)


def lose(
    *nodes: int, checkpoint: int = 0, copies: int = 0, of: Collection[int] = (), also: int = -1
) -> Callable[[Job], None]:
    """Return what kills these nodes.

    checkpoint: only when there is a checkpoint of that step. copies: only when there are copies of
    that step, of the ranks `of` or of all. also: a rank elsewhere that dies at the same moment.
    """

    def act(job: Job) -> None:
        if checkpoint:
            job.wait_event(journal.Checkpointed, step=checkpoint)
        if copies:
            job.wait_copies(copies, *(of or range(job.record.ranks)))
        if also >= 0:
            job.kill(also)
        job.kill_node(*nodes)

    return act
