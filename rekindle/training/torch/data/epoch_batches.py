"""Give the batches of one epoch of a loader after its first ones, in the loader's own order.

Batch k of an epoch depends only on the states at the begin of its iterator and on k. So a new
process that has these states continues at any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rekindle.errors import SessionError


class EpochBatches:
    """The batches of each epoch of one loader. Make one object for each loader, and keep it.

    reads: why a new process reads the batches that it skips, as a text for one line, such as "its
    data set is iterable". None: it skips indices, and reads no skipped sample.
    """

    reads: str | None = None

    def __init__(self, loader: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        """Check the loader. Raises SessionError: its order cannot be the same in a new process."""
        raise SessionError("not written yet")

    def states(self) -> dict[str, Any]:
        """Return the present states of all that decides the order of an epoch, as a new value.

        The generators of torch (CPU), `random` and `numpy.random`, those of the loader and of its
        samplers, and the samplers' own counters. The state format can hold the value. Take it
        before begin() for a new epoch, or read `Epoch.start`.
        """
        raise NotImplementedError

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the generators and the samplers to states(). Raises SessionError: another loader."""
        raise NotImplementedError

    def begin(self, skip: int = 0, start: Mapping[str, Any] | None = None) -> Epoch:
        """Begin an epoch after its first `skip` batches.

        start: the states at the begin of this epoch (`Epoch.start`), which it restores first. None:
        the present states. After it, the generators have the states that the first `skip` batches
        leave, if nothing else draws: the caller then sets those that the script has drawn from.
        Raises SessionError: the epoch has fewer than `skip` batches, or `start` is of another
        loader.
        """
        raise NotImplementedError


class Epoch(Iterator[Any]):
    """The remaining batches of one epoch.

    start: the states at its begin (before batch 0). taken: batches that it has given or skipped.
    """

    start: dict[str, Any]
    taken: int

    def __next__(self) -> Any:
        """Return the next batch.

        The random numbers that the data set draws in this process do not move the generators of the
        script. Raises SessionError: the order depends on random numbers that the script has drawn.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the loader's workers."""


def digest(states: Mapping[str, Any]) -> int:
    """Return 64 bits that are equal for equal states, so that ranks can compare them."""
    raise NotImplementedError
