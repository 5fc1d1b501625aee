"""MindSpore's side of a Session: the callbacks that its loop calls around each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore.train import Callback

from rekindle.errors import SessionError
from rekindle.rank.profiler import Profiler


class Rewind(Exception):
    """Training goes on from an earlier step: the loop has to be entered anew."""


def steps_of_epoch(epoch: int, dataset: mindspore.dataset.Dataset, *, sink: bool) -> int:
    """Return how many batches an epoch has. Raises SessionError: no step can be done like that."""
    if sink:
        raise SessionError("dataset_sink_mode=True: ranks agree before each step; leave it out")
    if epoch < 1:
        raise SessionError(f"epoch is {epoch}: no step can be done")
    per_epoch = int(dataset.get_dataset_size())
    if per_epoch < 1:
        raise SessionError("the dataset has no batch: no step can be done")
    return per_epoch


class Steps(Callback):  # type: ignore[misc]  # MindSpore is not there where types are checked
    """Before all other callbacks: a step begins, and has ended with the loss that it gave.

    finished: steps finished before; MindSpore would count from 0 again.
    """

    def __init__(
        self, finished: int, begin: Callable[[], None], end: Callable[[float | None], None]
    ) -> None:
        super().__init__()
        self._finished, self._begin, self._end = finished, begin, end

    def on_train_begin(self, run_context: Any) -> None:
        """Have the steps counted from where training is."""
        run_context.original_args().cur_step_num = self._finished

    def on_train_step_begin(self, run_context: Any) -> None:
        """A batch is there."""
        self._begin()

    def on_train_step_end(self, run_context: Any) -> None:
        """The graph has run."""
        self._end(loss_of(run_context.original_args().net_outputs))


class Settled(Callback):  # type: ignore[misc]  # as above
    """Behind all other callbacks: nobody changes the state of a step any more.

    From here on the loop waits for its next batch. Of an epoch's last step that is behind what
    callbacks do at the epoch's end: they may change parameters there, and what they keep.

    resume: called when all others have begun. settle: told whether one of them has asked to stop.
    """

    def __init__(
        self, resume: Callable[[], None], settle: Callable[[bool], None], profiler: Profiler
    ) -> None:
        super().__init__()
        self._resume, self._settle, self._profiler = resume, settle, profiler

    def on_train_begin(self, run_context: Any) -> None:
        """Others have set what they keep to nothing."""
        self._resume()

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """The first batch of an epoch."""
        self._profiler.begin_loading()

    def on_train_step_end(self, run_context: Any) -> None:
        """The next one, if the epoch has one."""
        params = run_context.original_args()
        is_last = params.cur_step_num % params.batch_num == 0
        if not is_last and not run_context.get_stop_requested():
            self._settle(False)
            self._profiler.begin_loading()

    def on_train_epoch_end(self, run_context: Any) -> None:
        """All have seen the last step of it."""
        self._settle(run_context.get_stop_requested())


def loss_of(outputs: Any) -> float | None:
    """Return the loss among what a train network gives; None: it gives no single number."""
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if isinstance(first, mindspore.Tensor) and first.size == 1:
        return float(first.asnumpy().reshape(-1)[0])
    return None
