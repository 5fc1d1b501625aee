"""One step of training, as the script's loop sees it."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from rekindle.errors import SessionError

if TYPE_CHECKING:
    from rekindle.training.torch_session import Session


class Step:
    """A step: `with step:` around all that it does, its collectives above all.

    number: counts from 0. indices: this rank's samples, if the Session has a sampler.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.number = session.finished
        self._metrics: dict[str, Any] = {}
        self._late: dict[str, torch.Tensor] = {}

    @property
    def indices(self) -> list[int]:
        """This rank's samples of this step; the same ones when the step is done again.

        Raises SessionError: the Session has no sampler.
        """
        sampler = self._session.sampler
        if sampler is None:
            raise SessionError("step.indices: give Session a sampler, Session(sampler=...)")
        return sampler.indices()

    def log(self, **metrics: Any) -> None:
        """Record values of this step: numbers, texts, lists of them, or tensors of one number.

        Called before backward, the record outlives the rank. A tensor on a device is read when the
        step ends, so that logging does not wait for the device.
        Raises SessionError: a value cannot be recorded.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and not value.is_cpu:
                self._late[name] = value.detach()
            else:
                self._metrics[name] = _plain(value)
        self._write(self._metrics)

    def __enter__(self) -> Step:
        """Begin the step with random streams of its own."""
        self._session.begin_step(self.number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the step; a fault of the generation is taken care of and does not reach the loop."""
        if error is not None:
            return isinstance(error, Exception) and self._session.leave_step(error)
        try:
            if self._late:
                late = {name: _plain(value) for name, value in self._late.items()}
                self._write({**self._metrics, **late})
            self._session.end_step()
        except Exception as late_error:  # devices tell of their faults when they are waited for
            if not self._session.leave_step(late_error):
                raise
        return False

    def _write(self, metrics: Mapping[str, Any]) -> None:
        self._session.records.write(self.number, self._session.generation, metrics)


def _plain(value: Any) -> Any:
    """Turn a tensor into a number (or list of them); float() of a float32 keeps it exactly."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value
