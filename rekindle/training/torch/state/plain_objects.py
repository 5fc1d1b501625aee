"""Keep values that have no state_dict(): generators, arrays and containers, filled in place.

The script keeps its own references to such a value, and to the containers in it. So a load changes
them, and puts no other object in their place.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rekindle.errors import SessionError
from rekindle.training.torch import private

_FILLED = (
    "a torch.Tensor, a torch.Generator, a NumPy array or generator, a random.Random, a list, dict, "
    "OrderedDict, defaultdict, Counter, set, deque or bytearray"
)


def is_stateful(value: Any) -> bool:
    """Return whether an object gives and takes its state."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def stateful(name: str, value: Any, argument: str = "extra") -> Any:
    """Return an object with state_dict() and load_state_dict() for an object of an argument.

    Raises SessionError: the object has no such methods, and cannot be filled in place.
    """
    if isinstance(value, type):
        kind = value.__name__
        raise SessionError(f"{argument}: {name!r} is the class {kind}; give an object of it")
    if is_stateful(value):
        return value
    if private.is_power_sgd(value):
        return _Slots(value)
    if type(value) in _FILL or isinstance(value, torch.Tensor):
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            raise SessionError(f"{argument}: the array {name!r} is read-only; give a copy of it")
        return _Filled(value)
    raise SessionError(
        f"{argument}: {name!r} is a {type(value).__qualname__}, which has no state_dict() and "
        "load_state_dict(), and cannot be filled in place; give it these methods, or give "
        f"{_FILLED}. A value that cannot change, such as a number, belongs into a dict"
    )


class _Filled:
    """An object whose state is the value itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value

    def load_state_dict(self, state: Any) -> None:
        if not _fill(self._value, state):
            raise SessionError(
                f"the {type(self._value).__name__} of the script cannot take the state of a "
                f"{type(state).__name__}: type, shape, dtype or maximum length differ"
            )


class _Slots:
    """The attributes of a communication hook's state, without its process group."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._names = [n for n in private.attributes_of(value) if n != "process_group"]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._value, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._names:
            setattr(self._value, name, filled(getattr(self._value, name), state[name]))


def _fill(live: Any, state: Any) -> bool:
    """Give a live value this state in place; False: it must be replaced."""
    if live is state:
        return True
    if isinstance(live, torch.Tensor):
        return _fill_tensor(live, state)
    change = _FILL.get(type(live))
    return change is not None and type(live) is type(state) and change(live, state)


def filled(live: Any, state: Any) -> Any:
    """Return the live value with this state, or the state if the live value cannot take it."""
    return live if _fill(live, state) else state


def _fill_tensor(live: torch.Tensor, state: Any) -> bool:
    like = isinstance(state, torch.Tensor) and (live.shape, live.dtype) == (
        state.shape,
        state.dtype,
    )
    if like and live.layout is torch.strided and not live.is_quantized:
        with torch.no_grad():
            live.copy_(state)
        return True
    return False


def _fill_mapping(live: Any, state: Mapping[Any, Any]) -> bool:
    former = dict(live)
    live.clear()
    live.update({key: filled(former.get(key), value) for key, value in state.items()})
    return True


def _fill_default(live: Any, state: Any) -> bool:
    live.default_factory = state.default_factory
    return _fill_mapping(live, state)


def _fill_list(live: list[Any], state: list[Any]) -> bool:
    former = live + [None] * (len(state) - len(live))
    live[:] = [filled(a, b) for a, b in zip(former, state, strict=False)]
    return True


def _fill_deque(live: deque[Any], state: deque[Any]) -> bool:
    if live.maxlen != state.maxlen:
        return False
    live.clear()
    live.extend(state)
    return True


def _fill_set(live: set[Any], state: set[Any]) -> bool:
    live.clear()
    live.update(state)
    return True


def _fill_bytes(live: bytearray, state: bytearray) -> bool:
    live[:] = state
    return True


def _fill_array(live: np.ndarray[Any, Any], state: np.ndarray[Any, Any]) -> bool:
    if (live.shape, live.dtype) != (state.shape, state.dtype) or not live.flags.writeable:
        return False
    live[...] = state
    return True


def _fill_generator(live: torch.Generator, state: torch.Generator) -> bool:
    if live.device != state.device:
        return False
    live.set_state(state.get_state())
    return True


def _fill_numpy(live: np.random.Generator, state: np.random.Generator) -> bool:
    if type(live.bit_generator) is not type(state.bit_generator):
        return False
    live.bit_generator.state = state.bit_generator.state
    return True


def _fill_legacy(live: np.random.RandomState, state: np.random.RandomState) -> bool:
    live.set_state(state.get_state(legacy=False))
    return True


def _fill_python(live: random.Random, state: random.Random) -> bool:
    live.setstate(state.getstate())
    return True


_FILL: Mapping[type, Callable[[Any, Any], bool]] = {
    dict: _fill_mapping,
    OrderedDict: _fill_mapping,
    Counter: _fill_mapping,
    defaultdict: _fill_default,
    list: _fill_list,
    deque: _fill_deque,
    set: _fill_set,
    bytearray: _fill_bytes,
    np.ndarray: _fill_array,
    torch.Generator: _fill_generator,
    np.random.Generator: _fill_numpy,
    np.random.RandomState: _fill_legacy,
    random.Random: _fill_python,
}
