"""What callbacks keep in Python from step to step, as a part of the training state.

Of MindSpore's own there are two that decide by what they have seen before. Others say what they
keep by `state_dict()`, and take it back by `load_state_dict()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspore.train import Callback, EarlyStopping, ReduceLROnPlateau

from rekindle.rank.json_values import plain, real

_OWN = {
    EarlyStopping: ("wait", "stopped_epoch", "best"),
    ReduceLROnPlateau: ("cooldown_counter", "wait", "best"),
}


class Memory:
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
