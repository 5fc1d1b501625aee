"""One step of training, for the script's loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from rekindle.errors import SessionError
from rekindle.training.data.sampler import StepSampler
from rekindle.training.torch.data.session_data import MicroBatch, Parts

if TYPE_CHECKING:
    from rekindle.training.torch.loop import Loop

_IN_PARTS = (
    "with keep_global_batch=True a rank may have several parts of a step; use for part in "
    "step.parts(): ..."
)
_WEIGHTED = "and (loss * part.weight).backward()"


class Step:
    """A step. Do all work of the step, with all its collectives, inside `with step:`.

    number: counts from 0. indices: this rank's samples, if the Session has a sampler.
    """

    def __init__(self, loop: Loop, number: int) -> None:
        self._loop = loop
        self.number = number
        self._metrics: dict[str, Any] = {}
        self._late: dict[str, torch.Tensor] = {}
        self._parts: Parts | None = None

    @property
    def indices(self) -> list[int]:
        """This rank's samples of this step. A repeated step has the same samples.

        Raises SessionError: the Session has no sampler, or keeps the global batch.
        """
        sampler = self._sampler("indices")
        if self._loop.given.keep_global_batch:
            raise SessionError(f"step.indices: {_IN_PARTS} part.indices, {_WEIGHTED}")
        return sampler.indices()

    @property
    def batch(self) -> Any:
        """This rank's batch of this step. A repeated step has the same samples.

        Use it inside `with step:`, in each step on every rank.
        Raises SessionError: the Session has no loader, or keeps the global batch.
        """
        if self._loop.given.keep_global_batch:
            raise SessionError(f"step.batch: {_IN_PARTS} part.batch, {_WEIGHTED}")
        return self._loop.data.batch()

    def parts(self) -> Iterator[MicroBatch]:
        """Yield this rank's parts of the step, for one forward and backward pass each.

        Use it inside `with step:`, and finish each part before you take the next. A step has
        several parts only with keep_global_batch=True, when the world is smaller than the full one.
        Raises SessionError: the Session has no sampler.
        """
        data, place = self._loop.data, self._loop.generations
        take = data.take if data.has_loader else None
        self._parts = Parts(place.model, self._sampler("parts()"), take)
        return self._parts.each(
            seed=self._loop.given.seed,
            rank=place.rank,
            world_size=place.world_size,
            step=self.number,
        )

    def log(self, **metrics: Any) -> None:
        """Record values of this step: numbers, texts, lists of them, or tensors of one number.

        Call it before backward: the record then survives the loss of the rank. A tensor on a device
        is read when the step ends, so that logging does not wait for the device.
        Raises SessionError: a value cannot be recorded.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                self._late[name] = value.detach()
            else:
                self._metrics[name] = _plain(value)
        self._write(self._metrics)

    def __enter__(self) -> Step:
        """Begin the step with its own random streams."""
        self._loop.begin_step(self.number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the step; the Session handles a fault of the generation without an error here."""
        if self._parts is not None:
            self._parts.close()
        if error is not None:
            return isinstance(error, Exception) and self._loop.leave_step(error)
        try:
            if self._loop.given.keep_global_batch and (self._parts is None or self._parts.left):
                raise SessionError(
                    "keep_global_batch=True: the step ended before the script had used all of "
                    "its parts; loop over step.parts() to the end"
                )
            if not self._loop.data.was_taken:
                raise SessionError(
                    "the script did not use step.batch in this step, so the next step would get "
                    "the same batch; use step.batch in each step"
                )
            if self._late:
                late = {name: _plain(value) for name, value in self._late.items()}
                self._write({**self._metrics, **late})
            self._loop.end_step()
        except Exception as late_error:  # devices report their faults late
            if not self._loop.leave_step(late_error):
                raise
        return False

    def _sampler(self, asked: str) -> StepSampler:
        sampler = self._loop.data.sampler
        if sampler is None:
            raise SessionError(f"step.{asked}: give Session a sampler, Session(sampler=...)")
        return sampler

    def _write(self, metrics: Mapping[str, Any]) -> None:
        self._loop.records.write(self.number, self._loop.generation, metrics)


def _plain(value: Any) -> Any:
    """Return a tensor as a number or a list; the float of a float32 keeps it exactly."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value
