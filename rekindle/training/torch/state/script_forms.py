"""Write the value of a script's variable in a form that another process can read.

Most values stand for themselves. An object of the script becomes its names and values. An object
without such a form, which the script makes in each process, becomes a hole.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from rekindle.errors import SessionError
from rekindle.training.torch.state.plain_objects import filled
from rekindle.training.torch.state.script_names import (
    ATOMS,
    LONG,
    MISSING,
    SMALL_BYTES,
    Names,
    is_named,
    is_of_script,
    print_of,
)
from rekindle.training.torch.state.skeleton import Writer

_MOST = 200_000  # values in one variable
_DEEPEST = 100  # objects inside of each other
_SEQUENCES = (list, tuple, deque)


class Hole(NamedTuple):
    """An object that the script makes in each process, and that has stayed the same."""

    path: str


class Made(NamedTuple):
    """An object, a class or a function of the script. kind: its module and its name in it."""

    kind: str
    names: dict[str, Any]


class Held(NamedTuple):
    """A container of a class that only the script can make. kind: the class."""

    kind: str
    elements: Any


class Numbers(NamedTuple):
    """A list of floats, or of integers."""

    values: Any


class NoForm(NamedTuple):
    """A value, or one inside of it, has no form. path: of this value."""

    path: str
    why: str


def form_of(value: Any, path: str, first: dict[str, Any], *, learns: bool = False) -> Any:
    """Return the form of a value, or NoForm.

    first: objects without a form that the script has made, by path. A hole stands for one of them,
    and for a reference to an object around the value. learns: note those objects in `first`.
    """
    try:
        return _Packer(first, learns).pack(value, path)
    except _Unknown as unknown:
        return NoForm(*unknown.args)


class _Unknown(Exception):
    """A value has no form. The arguments are its path and why."""


class _Packer:
    def __init__(self, first: dict[str, Any], learns: bool) -> None:
        self._first = first
        self._learns = learns
        self._open: set[int] = set()  # the values around this one

    def pack(self, value: Any, path: str) -> Any:
        """Return the form of a value. Raises _Unknown: an object without a form is new."""
        if type(value) in ATOMS and type(value) is not ModuleType:
            return value
        if len(self._open) > _DEEPEST:
            raise _Unknown(path, f"has more than {_DEEPEST} objects inside of each other")
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            value = value.detach()
        try:
            return self._form(value, path)
        except _Unknown as unknown:
            if unknown.args[0] != path:
                raise
            mark = id(value) if id(value) in self._open else _mark(value)
            if self._learns:
                self._first[path] = mark
            elif self._first.get(path) != mark:
                raise
            return Hole(path)

    def _form(self, value: Any, path: str) -> Any:
        is_container = isinstance(value, list | tuple | deque | dict)
        if is_container:
            if len(value) > (LONG if self._learns else _MOST):
                raise _Unknown(path, f"has {len(value)} elements")
            numbers = _numbers(value)
            if numbers is not None:
                return numbers
        elif not is_named(value):
            return _leaf(value, path)
        if id(value) in self._open:
            raise _Unknown(path, "refers to an object around it")
        self._open.add(id(value))
        try:
            return self._elements(value, path) if is_container else self._named(value, path)
        finally:
            self._open.discard(id(value))

    def _named(self, value: Any, path: str) -> Made:
        names = Names(value).read().items()
        return Made(_kind_of(value), {n: self.pack(v, f"{path}.{n}") for n, v in names})

    def _elements(self, value: Any, path: str) -> Any:
        """Return a container of the same kind with the forms of its elements."""
        kind: Any = type(value)
        found: Any
        if isinstance(value, dict):
            found = {k: self.pack(v, f"{path}.{k}") for k, v in dict.items(value)}
        else:
            found = [self.pack(v, f"{path}.{i}") for i, v in enumerate(value)]
        if kind in (list, dict):
            return found
        if kind in (OrderedDict, Counter, tuple):
            return kind(found)
        if kind is deque:
            return deque(found, value.maxlen)
        if hasattr(kind, "_fields"):
            return kind(*found)
        return Held(f"{kind.__module__}:{kind.__qualname__}", found)


def _leaf(value: Any, path: str) -> Any:
    """Return a value that a state can hold. Raises _Unknown: it cannot."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > SMALL_BYTES:
        raise _Unknown(path, f"has {value.nbytes} bytes")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise _Unknown(path, "is a parameter")
    try:
        Writer().encode(value, path)
    except SessionError:
        raise _Unknown(path, f"is a {type(value).__qualname__}") from None
    return value


def _mark(value: Any) -> Any:
    """Return what shows that an object without a form is the same, and has not changed."""
    return id(value), print_of(value, whole=True)


def _numbers(value: Any) -> Numbers | None:
    """Return a long list of numbers in a form that is fast to write; None: it is another value."""
    if type(value) is not list or len(value) <= 64:
        return None
    kinds = set(map(type, value))
    if kinds == {float}:
        return Numbers(np.asarray(value, np.float64))
    if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
        return Numbers(np.asarray(value, np.int64))
    return None


def size_of(packed: Any) -> int:
    """Return about the bytes of a form."""
    if isinstance(packed, Made):
        return sum(map(size_of, packed.names.values()))
    if isinstance(packed, Numbers):
        return int(packed.values.nbytes)
    if isinstance(packed, Held):
        return size_of(packed.elements)
    if isinstance(packed, dict):
        return sum(map(size_of, packed.values()))
    if isinstance(packed, _SEQUENCES):
        return sum(map(size_of, packed))
    return int(getattr(packed, "nbytes", 0)) or (len(packed) if isinstance(packed, str) else 8)


def unpacked(packed: Any, live: Any, path: str) -> Any:
    """Return the value of a form, if possible in the live value of this process.

    Raises SessionError: the script has not made an object that the former process had.
    """
    if isinstance(packed, Hole):
        if live is MISSING:
            raise SessionError(f"the script has not made {path} in this process")
        return live
    if isinstance(packed, Made):
        return _made(packed, live, path)
    if isinstance(packed, Numbers):
        packed = packed.values.tolist()
    if isinstance(packed, Held):
        if live is MISSING or _kind_of(live) != packed.kind:
            raise SessionError(f"the script has not made {path}, a {packed.kind}, in this process")
        packed = packed.elements
    if isinstance(packed, dict):
        was = live if isinstance(live, dict) else {}
        new = {k: unpacked(v, was.get(k, MISSING), f"{path}.{k}") for k, v in packed.items()}
        if isinstance(live, dict):
            live.clear()
            live.update(new) if isinstance(live, OrderedDict) else dict.update(live, new)
            return live
        return type(packed)(new)
    if isinstance(packed, _SEQUENCES):
        had = list(live) if isinstance(live, _SEQUENCES) else []
        had += [MISSING] * (len(packed) - len(had))
        items = [
            unpacked(each, old, f"{path}.{i}")
            for i, (each, old) in enumerate(zip(packed, had, strict=False))
        ]
        return _sequence(packed, live, items)
    return packed if live is MISSING else filled(live, packed)


def _sequence(packed: Any, live: Any, items: list[Any]) -> Any:
    """Return the sequence with these elements, if possible the live one of this process."""
    if isinstance(live, list) and isinstance(packed, list):
        live[:] = items
        return live
    if isinstance(packed, list | deque) and isinstance(live, deque):
        live.clear()
        live.extend(items)
        return live
    if isinstance(packed, deque):
        return deque(items, packed.maxlen)
    return type(packed)(*items) if hasattr(packed, "_fields") else type(packed)(items)


def _kind_of(value: Any) -> str:
    named = value if isinstance(value, type | FunctionType) else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def _made(packed: Made, live: Any, path: str) -> Any:
    if live is MISSING or _kind_of(live) != packed.kind:
        module, _, name = packed.kind.partition(":")
        kind: Any = sys.modules.get(module)
        for part in name.split("."):
            kind = getattr(kind, part, None)
        if not isinstance(kind, type) or not is_of_script(kind):
            raise SessionError(f"the script has not made {path}, a {name}, in this process")
        live = object.__new__(kind)
    names = Names(live)
    now = names.read()
    values = packed.names.items()
    new = {n: unpacked(v, now.get(n, MISSING), f"{path}.{n}") for n, v in values}
    names.write(new, drops=[name for name in now if name not in new])
    return live
