"""MindSpore's callbacks around each step, and the values that callbacks keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
from mindspore.train import Callback, EarlyStopping, ReduceLROnPlateau

from rekindle.errors import SessionError
from rekindle.rank.json_values import plain, real
from rekindle.rank.profiler import Profiler

_OWN = {
    EarlyStopping: ("wait", "stopped_epoch", "best"),
    ReduceLROnPlateau: ("cooldown_counter", "wait", "best"),
}


class CallbackState:
    """callbacks: those that training is watched by, in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = [each for each in callbacks if _keeps(each)]

    def state(self) -> list[Any]:
        """What they keep, as JSON has it. Raises SessionError: something else is among it."""
        return [
            {"kind": _kind(each), "state": plain(_state_of(each), _kind(each))}
            for each in self._callbacks
        ]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Give it back to callbacks of the same class, in their order; new ones begin anew."""
        left = list(state)
        for callback in self._callbacks:
            found = next((each for each in left if each["kind"] == _kind(callback)), None)
            if found is not None:
                left.remove(found)
                _load(callback, real(found["state"]))


def _keeps(callback: Callback) -> bool:
    if _says(callback):
        return True
    # The weights of its best epoch are none of the model's: without them the rest is wrong.
    whole = not getattr(callback, "restore_best_weights", False)
    return isinstance(callback, tuple(_OWN)) and whole


def _says(callback: Callback) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(callback, name, None)) for name in names)


def _kind(callback: Callback) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _names(callback: Callback) -> tuple[str, ...]:
    return next(names for kind, names in _OWN.items() if isinstance(callback, kind))


def _state_of(callback: Callback) -> Any:
    if _says(callback):
        return callback.state_dict()
    return {name: getattr(callback, name) for name in _names(callback)}


def _load(callback: Callback, state: Any) -> None:
    if _says(callback):
        callback.load_state_dict(state)
        return
    for name in _names(callback):
        setattr(callback, name, state[name])


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
