"""Write the value of a script's variable in a form that another process can read.

Most values stand for themselves. An object of the script becomes its names and values. An object
without such a form, which the script makes in each process, becomes a hole.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Set
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from rekindle.errors import SessionError
from rekindle.training.torch.data.epoch_order import GENERATORS
from rekindle.training.torch.state.script_names import (
    ATOMS,
    LONG,
    SMALL_BYTES,
    Names,
    is_named,
    is_of_script,
)
from rekindle.training.torch.state.script_prints import Prints
from rekindle.training.torch.state.skeleton import Writer

_MOST = 200_000  # values in one variable
_DEEPEST = 100  # objects inside of each other
_PLAIN = ATOMS - {ModuleType}
SEQUENCES = (list, tuple, deque)
_CHANGING = (list, deque, dict, set, bytearray, torch.Tensor, np.ndarray, *GENERATORS)
FACTORIES = (None, int, float, str, bool, list, dict, set)  # those that a new process can name
DEFAULTDICT = "defaultdict:"  # and the number of its factory


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


class Fresh(NamedTuple):
    """The form of an object that the script has made in its loop."""

    form: Any


class Moved(NamedTuple):
    """The form of an object that the script has made at another path, before its loop."""

    path: str
    form: Any


class Shared(NamedTuple):
    """The form of an object that the variables have at several paths, at the first of them."""

    number: int
    form: Any


class Same(NamedTuple):
    """The shared object of this number."""

    number: int


class NoForm(NamedTuple):
    """A value, or one inside of it, has no form. path: of this value."""

    path: str
    why: str


class Learned:
    """The objects of the script at a place that each new process reaches as well.

    objects: the objects that can change, by path. paths: the first path of each object, by id.
    marks: the objects without a form, by path, with a value that shows a change. spaces: the
    spaces of these objects.
    """

    def __init__(self, prints: Prints) -> None:
        self._prints = prints
        self.objects: dict[str, Any] = {}
        self.paths: dict[int, str] = {}
        self.marks: dict[str, Any] = {}
        self.spaces: set[str] = set()

    def mark_of(self, value: Any) -> Any:
        """Return what shows that an object without a form is the same, and has not changed."""
        return id(value), self._prints.of(value, whole=True)

    def learn(self, space: str, live: Mapping[str, Any]) -> None:
        """Note the values of a space, if they are not known."""
        if space not in self.spaces:
            self.spaces.add(space)
            for name, value in live.items():
                if type(value) not in ATOMS:
                    _Packer(self, learns=True).form(value, f"{space}:{name}")


def forms_of(values: Mapping[str, Any], learned: Learned) -> dict[str, Any]:
    """Return the forms of values by path; NoForm: a value has none.

    A hole stands for a learned object without a form, and for a reference to an object around it.
    """
    first = _Packer(learned)
    found = {path: first.form(value, path) for path, value in values.items()}
    if not first.repeated:
        return found
    again = _Packer(learned, shared=first.repeated)
    return {path: again.form(value, path) for path, value in values.items()}


class _Unknown(Exception):
    """A value has no form. The arguments are its path and why."""


class _Packer:
    """Finds forms.

    shared: the ids of the objects with several paths. repeated: the ids that it has met again.
    """

    def __init__(
        self, learned: Learned, *, learns: bool = False, shared: Set[int] = frozenset()
    ) -> None:
        self._learned = learned
        self._learns = learns
        self._shared = shared
        self._open: set[int] = set()  # the values around this one
        self._numbers: dict[int, int] = {}  # of objects that can change, by id
        self.repeated: set[int] = set()

    def form(self, value: Any, path: str) -> Any:
        """Return the form of a value, or NoForm."""
        try:
            return self._pack(value, path)
        except _Unknown as unknown:
            return NoForm(*unknown.args)

    def _pack(self, value: Any, path: str) -> Any:
        """Return the form of a value. Raises _Unknown: an object without a form is new."""
        if type(value) in _PLAIN:
            return value
        if len(self._open) > _DEEPEST:
            raise _Unknown(path, f"has more than {_DEEPEST} objects inside of each other")
        known = len(self._numbers)
        try:
            if isinstance(value, _CHANGING) or is_named(value):
                return self._changing(value, path)
            return self._form(value, path)
        except _Unknown as unknown:
            while len(self._numbers) > known:  # the objects in it have no form here
                self._numbers.popitem()
            if unknown.args[0] != path:
                raise
            mark = id(value) if id(value) in self._open else self._learned.mark_of(value)
            if self._learns:
                self._learned.marks[path] = mark
            elif self._learned.marks.get(path) != mark:
                raise
            return Hole(path)

    def _changing(self, value: Any, path: str) -> Any:
        """Return the form of an object that can change, with what it is in a new process."""
        key, learned = id(value), self._learned
        if self._learns:
            if not _holds_memory(value):
                learned.objects.setdefault(path, value)
                if learned.objects[path] is value:
                    learned.paths.setdefault(key, path)
            return self._form(value, path)
        if key in self._numbers:
            self.repeated.add(key)
            if key in self._shared:
                return Same(self._numbers[key])
        form = self._form(value, path)
        if learned.objects.get(path) is not value:
            place = learned.paths.get(key)
            if place is not None:
                form = Moved(place, form)
            else:
                _check_new(form, value, path)
                form = Fresh(form)
        number = self._numbers.setdefault(key, len(self._numbers))
        return Shared(number, form) if key in self._shared else form

    def _form(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            value = value.detach()
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
        return Made(name_of(value), {n: self._pack(v, f"{path}.{n}") for n, v in names})

    def _elements(self, value: Any, path: str) -> Any:
        """Return a container of the same kind with the forms of its elements."""
        kind: Any = type(value)
        found: Any
        if isinstance(value, dict):
            pairs = dict.items(value)
            found = {k: v if type(v) in _PLAIN else self._pack(v, f"{path}.{k}") for k, v in pairs}
        else:
            found = [
                v if type(v) in _PLAIN else self._pack(v, f"{path}.{i}")
                for i, v in enumerate(value)
            ]
        if kind in (list, dict):
            return found
        if kind in (OrderedDict, Counter, tuple):
            return kind(found)
        if kind is deque:
            return deque(found, value.maxlen)
        if hasattr(kind, "_fields"):
            return kind(*found)
        if kind is defaultdict and value.default_factory in FACTORIES:
            return Held(f"{DEFAULTDICT}{FACTORIES.index(value.default_factory)}", found)
        return Held(name_of(value), found)


def _holds_memory(value: Any) -> bool:
    """Return whether a reference to the value could keep much memory alive."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return True
    return isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > SMALL_BYTES


def _check_new(form: Any, value: Any, path: str) -> None:
    """Check that a new process can make this object. Raises _Unknown: it cannot."""
    makes_class = isinstance(form, Made) and class_of(form.kind) is not None
    makes = makes_class and not isinstance(value, type | FunctionType)
    if isinstance(form, Held) and form.kind.startswith(DEFAULTDICT):
        makes = True
    if isinstance(form, Made | Held) and not makes:
        raise _Unknown(path, f"is a {type(value).__qualname__} that the script makes in its loop")


def name_of(value: Any) -> str:
    """Return the module and the name of a class or function, or of the class of a value."""
    named = value if isinstance(value, type | FunctionType) else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def class_of(name: str) -> type | None:
    """Return the class of the script with this module and name."""
    module, _, place = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in place.split("."):
        kind = getattr(kind, part, None)
    return kind if isinstance(kind, type) and is_of_script(kind) else None


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
    kind = type(packed)
    if kind in _PLAIN:
        return len(packed) if kind in (str, bytes) else 8
    if isinstance(packed, dict):
        return sum(map(size_of, packed.values()))
    if kind in (Fresh, Moved, Shared):
        return size_of(packed.form)
    if kind is Made:
        return sum(map(size_of, packed.names.values()))
    if kind is Numbers:
        return int(packed.values.nbytes)
    if kind is Held:
        return size_of(packed.elements)
    if isinstance(packed, SEQUENCES):
        return sum(map(size_of, packed))
    return int(getattr(packed, "nbytes", 0)) or 8
