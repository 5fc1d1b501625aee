"""MindSpore's callbacks around each step, and the values that callbacks keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mindspore
from mindspore.dataset.engine.datasets import _reset_training_dataset
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.train import Callback, EarlyStopping, Model, ReduceLROnPlateau

from rekindle.errors import SessionError
from rekindle.rank.json_values import plain, real
from rekindle.rank.profiler import Profiler

_COMPLETE = ("stand_alone", "data_parallel")  # the parallel modes without shards
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


class Pace(NamedTuple):
    """The loop of MindSpore. A step is a batch, or one sink of several batches.

    per_epoch: steps of an epoch of `Model.train`. batches: of one step.
    """

    per_epoch: int
    batches: int


def check_model(model: Model) -> None:
    """Check that each of several ranks has the complete state.

    Raises SessionError: it has only a part.
    """
    context = mindspore.get_auto_parallel_context
    mode, shards = context("parallel_mode"), context("enable_parallel_optimizer")
    if any(isinstance(cell, AutoParallel) for _, cell in model.train_network.cells_and_names()):
        mode = "AutoParallel"
    if mode not in _COMPLETE or shards:
        found = f"{mode} with enable_parallel_optimizer" if mode in _COMPLETE else mode
        raise SessionError(
            f"the parallel mode is {found}, so each rank has only a part of the state; a Session "
            "needs ParallelMode.DATA_PARALLEL; other modes work with TFTRegister or "
            "TrainFaultTolerance, without a Session"
        )


def pace_of(
    epoch: int, dataset: mindspore.dataset.Dataset, *, sink: bool, sink_size: int = -1
) -> Pace:
    """Return the pace of a training. Raises SessionError: these arguments allow no step."""
    if epoch < 1:
        raise SessionError(f"epoch is {epoch}, so training has no step; give at least 1")
    batches = int(dataset.get_dataset_size())
    if batches < 1:
        raise SessionError("the dataset has no batch, so training has no step")
    if not sink:
        return Pace(batches, 1)
    target, mode = mindspore.get_context("device_target"), mindspore.get_context("mode")
    if target != "Ascend" or mode != mindspore.GRAPH_MODE:
        raise SessionError(
            f"dataset_sink_mode=True is not possible: MindSpore sinks data only on NPUs in graph "
            f"mode, and this is {target}; leave it out"
        )
    return Pace(1, batches if sink_size == -1 else sink_size)


def move_data(dataset: mindspore.dataset.Dataset, batch: int) -> None:
    """Let a dataset continue with a batch of the run, also one that feeds a device already."""
    dataset.set_init_step(batch)
    if hasattr(dataset, "_dataset_helper"):
        _reset_training_dataset(batch, int(dataset.get_dataset_size()))


class Steps(Callback):  # type: ignore[misc]  # MindSpore is absent where types are checked
    """Run before all other callbacks: report each step's start, and its end with its loss.

    batches: those that were finished before. MindSpore would count from 0 again.
    """

    def __init__(
        self, batches: int, begin: Callable[[], None], end: Callable[[float | None], None]
    ) -> None:
        super().__init__()
        self._batches, self._begin, self._end = batches, begin, end

    def on_train_begin(self, run_context: Any) -> None:
        """Make MindSpore count from the finished batches."""
        run_context.original_args().cur_step_num = self._batches

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
