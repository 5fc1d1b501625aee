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
    """Keep the state of callbacks.

    callbacks: the callbacks of the training, in their order.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = [each for each in callbacks if _keeps(each)]

    def state(self) -> list[Any]:
        """Return the callbacks' values for JSON. Raises SessionError: JSON cannot hold one."""
        return [
            {"kind": _kind(each), "state": plain(_state_of(each), _kind(each))}
            for each in self._callbacks
        ]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Give values to callbacks of the same class, in order; others start without values."""
        left = list(state)
        for callback in self._callbacks:
            found = next((each for each in left if each["kind"] == _kind(callback)), None)
            if found is not None:
                left.remove(found)
                _load(callback, real(found["state"]))


def _keeps(callback: Callback) -> bool:
    if _says(callback):
        return True
    # The model does not hold the weights of the callback's best epoch. Without them its other
    # values are wrong.
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
    """Training continues from an earlier step, so the loop must start again."""


def steps_of_epoch(epoch: int, dataset: mindspore.dataset.Dataset, *, sink: bool) -> int:
    """Return the batches of an epoch. Raises SessionError: these arguments allow no step."""
    if sink:
        raise SessionError(
            "dataset_sink_mode=True is not possible, because ranks agree before each step; "
            "leave it out"
        )
    if epoch < 1:
        raise SessionError(f"epoch is {epoch}, so training has no step; give at least 1")
    per_epoch = int(dataset.get_dataset_size())
    if per_epoch < 1:
        raise SessionError("the dataset has no batch, so training has no step")
    return per_epoch


class Steps(Callback):  # type: ignore[misc]  # MindSpore is absent where types are checked
    """Run before all other callbacks: report each step's start, and its end with its loss.

    finished: the steps that were finished before. MindSpore would count from 0 again.
    """

    def __init__(
        self, finished: int, begin: Callable[[], None], end: Callable[[float | None], None]
    ) -> None:
        super().__init__()
        self._finished, self._begin, self._end = finished, begin, end

    def on_train_begin(self, run_context: Any) -> None:
        """Make MindSpore count from the finished steps."""
        run_context.original_args().cur_step_num = self._finished

    def on_train_step_begin(self, run_context: Any) -> None:
        """Begin a step: its batch is loaded."""
        self._begin()

    def on_train_step_end(self, run_context: Any) -> None:
        """End a step: its graph has run."""
        self._end(loss_of(run_context.original_args().net_outputs))


class Settled(Callback):  # type: ignore[misc]  # as above
    """Run after all other callbacks, so that no later callback changes the state of a step.

    From here on the loop waits for its next batch. For an epoch's last step, this class runs after
    the callbacks at the epoch's end: they may change parameters there, and their own values.

    resume: called when all other callbacks have begun. settle: called with whether a callback has
    requested the end of the training.
    """

    def __init__(
        self, resume: Callable[[], None], settle: Callable[[bool], None], profiler: Profiler
    ) -> None:
        super().__init__()
        self._resume, self._settle, self._profiler = resume, settle, profiler

    def on_train_begin(self, run_context: Any) -> None:
        """Resume the callbacks, after the others have reset their values."""
        self._resume()

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Begin to load the first batch of an epoch."""
        self._profiler.begin_loading()

    def on_train_step_end(self, run_context: Any) -> None:
        """Settle the step, and begin to load the next batch if the epoch has one."""
        params = run_context.original_args()
        is_last = params.cur_step_num % params.batch_num == 0
        if not is_last and not run_context.get_stop_requested():
            self._settle(False)
            self._profiler.begin_loading()

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Settle the epoch's last step: all callbacks have seen it."""
        self._settle(run_context.get_stop_requested())


def loss_of(outputs: Any) -> float | None:
    """Return the loss from a train network's outputs; None: the first is not a single number."""
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if isinstance(first, mindspore.Tensor) and first.size == 1:
        return float(first.asnumpy().reshape(-1)[0])
    return None
