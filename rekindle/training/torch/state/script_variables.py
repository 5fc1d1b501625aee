"""Give a new process the variables of the script's loops that change from block to block.

The new process runs the script from its beginning, up to the batch of the other ranks. There the
variables take the values that the former process had at the same place. They are a part of the
state that a rank shares with no other, see own_state.py.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.training.torch.data.epoch_position import Place
from rekindle.training.torch.state.plain_objects import filled
from rekindle.training.torch.state.script_names import (
    ATOMS,
    LONG,
    MISSING,
    Names,
    digest_of,
    is_iterator,
    is_named,
    is_of_script,
    kind_of,
    position_of,
    print_of,
    print_of_tensor,
    reads_later,
    roots_of,
    stack_of,
)
from rekindle.training.torch.state.script_values import SMALL_BYTES, is_watched
from rekindle.training.torch.state.skeleton import Writer

LIMIT_BYTES = 16 << 20  # of all values
NOTICE_BYTES = 1 << 20
_MOST = 200_000  # values in one variable
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


class _Unknown(Exception):
    """A value has no form that another process could read. The arguments are its path and why."""


class Variables:
    """The variables of the loops that change.

    kept: objects that the Session keeps itself. ignore: objects that may be lost, or their names.
    is_new: the process has come to no place in a loop yet.
    """

    def __init__(self, kept: Iterable[Any], ignore: Iterable[Any]) -> None:
        kept, ignore = list(kept), list(ignore)
        self._modules = [each for each in kept if isinstance(each, torch.nn.Module)]
        self._left = {id(each) for each in (*kept, *ignore) if not isinstance(each, str)}
        self._ignored = {each for each in ignore if isinstance(each, str)}
        self._prints: dict[str, dict[str, Any]] = {}  # of each value, by its space
        self._first: dict[str, Any] = {}  # what this process made: objects without a form, by path
        self._bound: dict[str, set[str]] = {}  # the names that the script has set before the loop
        self._late: dict[str, set[str]] = {}  # names that only take() has set
        self._moving: dict[str, set[str]] = {}
        self._state: dict[str, Any] = {}
        self._long: dict[str, dict[str, Any]] = {}  # the same, with all of long containers
        self._lasting: dict[
            str, frozenset[str] | None
        ] = {}  # what an epoch may read of those before it
        self._looks = 0
        self._told = False
        self.is_new = True

    @property
    def place(self) -> Place | None:
        """The place that the values belong to; None: there are no values."""
        return Place(*self._state["place"]) if self._state else None

    @property
    def has_values(self) -> bool:
        """Whether there are values at the last place."""
        return bool(self._state and self._state["values"])

    @property
    def lasts(self) -> bool:
        """Whether a later epoch may read one of the values."""
        return bool(self._state and self._state["lasts"])

    def state_dict(self) -> dict[str, Any]:
        """Return the values at the last place."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a former process, for take()."""
        self._state = dict(state)

    def take(self, frame: FrameType) -> None:
        """Set the variables to the received values. frame: it asks for an epoch or a batch.

        Raises SessionError: the script has not made what the former process had.
        """
        spaces = dict(_spaces(frame, self._modules))
        for space, values in self._state["values"].items():
            if space not in spaces:
                raise SessionError(f"{', '.join(values)} of {space} do not exist in this process")
            names = spaces[space]
            live = names.read()
            new = {n: _unpacked(v, live.get(n, MISSING), n) for n, v in values.items()}
            names.write({n: v for n, v in new.items() if live.get(n, MISSING) is not v})
            self._moving.setdefault(space, set()).update(values)
            self._late[space] = values.keys() - live.keys()

    def look(self, frame: FrameType, place: Place, *, outer: bool) -> None:
        """Find the variables that have changed since the last place, and keep their values.

        outer: an epoch begins, so functions that it calls begin again.
        Raises SessionError: one has a value that no other process could get.
        """
        self.is_new = False
        self._looks += 1
        spaces = dict(_spaces(frame, self._modules))
        if outer:
            for known in (self._prints, self._long, self._bound, self._moving):
                for space in known.keys() - spaces.keys():
                    del known[space]
            self._lasting = {space: _read_later(each) for space, each in spaces.items()}
        values = {space: self._look_at(space, names) for space, names in spaces.items()}
        self._check_size(sum(_size_of(each) for each in values.values()))
        values = {space: each for space, each in values.items() if each}
        lasting = {space: self._lasting[space] for space in self._lasting.keys() & values.keys()}
        lasts = any(n is None or n & values[space].keys() for space, n in lasting.items())
        self._state = {"place": list(place), "values": values, "lasts": lasts}

    def prints(self, frame: FrameType) -> dict[str, dict[str, Any]]:
        """Return values by space and name that change with the variables."""
        spaces = _spaces(frame, self._modules)
        return {space: _prints(self._live(names), whole=True) for space, names in spaces}

    def check_run(self, before: Mapping[str, Mapping[str, Any]], frame: FrameType) -> None:
        """Check after a function of session.run(). before: prints() from before it.

        Raises SessionError: the function has changed variables.
        """
        now = self.prints(frame)
        changed = []
        for space, names in before.items():
            new = {**names, **now.get(space, {})}
            changed += [n for n, old in names.items() if new[n] is not old and new[n] != old]
        if changed:
            raise SessionError(
                f"session.run(): the function changes {', '.join(changed)}, but a new process gets "
                "only its result: return the values, and set the variables after the call; or list "
                f"the names in ignore=[{changed[0]!r}] if they may be lost"
            )

    def _look_at(self, space: str, names: Names) -> dict[str, Any]:
        """Return the forms of the variables of one space that change."""
        live = self._live(names)
        moving = self._moving.setdefault(space, set())
        is_first = space not in self._bound
        if is_first:
            self._learn(space, live)
        watched = (False, True) if is_watched(self._looks) or is_first else (False,)
        for known, whole in zip((self._prints, self._long), watched, strict=False):
            now = _prints(live, whole=whole)
            before, known[space] = known.get(space, now), now
            if now != before and not is_first:
                moving |= {n for n, p in now.items() if n not in before or before[n] != p}
        forms = ((name, self._packed(space, name, live)) for name in moving & live.keys())
        return {name: packed for name, packed in forms if packed is not MISSING}

    def _live(self, names: Names) -> dict[str, Any]:
        """Return the values of a space that the script may read later."""
        read, values = _read_later(names), names.read()
        counts = values.keys() - self._ignored
        counts = counts if read is None else counts & read
        return {name: values[name] for name in counts if id(values[name]) not in self._left}

    def _learn(self, space: str, live: Mapping[str, Any]) -> None:
        """Note the objects without a form that the script has made before its loop."""
        self._bound[space] = live.keys() - self._late.get(space, set())
        for name, value in live.items():
            if type(value) not in ATOMS:
                try:
                    _pack(value, f"{space}:{name}", self._first, learns=True)
                except _Unknown:
                    self._first[f"{space}:{name}"] = id(value)

    def _packed(self, space: str, name: str, live: Mapping[str, Any]) -> Any:
        """Return the form of a value; MISSING: a new process does not have this variable."""
        try:
            return _pack(live[name], f"{space}:{name}", self._first)
        except _Unknown as unknown:
            if name not in self._bound.get(space, ()):
                return MISSING
            path, why = unknown.args
            path = path.rpartition(":")[2]
            raise SessionError(
                f"{path} changes from block to block and {why}, so a process that replaces this "
                f"rank could not get it: give it to the Session, extra={{...}}, make it again at "
                f"the begin of each epoch, or list it in ignore=[{name!r}] if it may be lost"
            ) from None

    def _check_size(self, size: int) -> None:
        if size <= NOTICE_BYTES:
            return
        names = ", ".join(sorted({name for each in self._moving.values() for name in each}))
        if size > LIMIT_BYTES:
            raise SessionError(
                f"{names} change from block to block and have {size >> 20} MiB, and a copy before "
                f"each block has at most {LIMIT_BYTES >> 20}: give them to the Session, "
                "extra={...}, or list their names in ignore=[...] if they may be lost"
            )
        if not self._told:
            self._told = True
            say(f"{size / 1e6:.0f} MB of variables are copied before each block: {names}")


def _prints(live: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    return {n: v if type(v) in ATOMS else print_of(v, whole=whole) for n, v in live.items()}


def _read_later(names: Names) -> frozenset[str] | None:
    """Return the names whose present values the running code may read; None: all."""
    if isinstance(names.thing, FrameType):
        return reads_later(names.thing)
    for frame in stack_of(sys._getframe()):
        if frame.f_locals is frame.f_globals is names.thing:
            return reads_later(frame)
    return None


def _spaces(frame: FrameType, modules: list[torch.nn.Module]) -> Iterator[tuple[str, Names]]:
    """Yield the names that a process finds again, by a text that is the same in each process."""
    depth = sum(1 for _ in stack_of(frame))
    for name, thing in roots_of(frame, modules):
        if isinstance(thing, FrameType):
            yield f"{thing.f_code.co_name}() {depth}", Names(thing)
            depth -= 1
        elif isinstance(thing, dict):
            yield thing.get("__name__", name), Names(thing)
        else:
            yield name, Names(thing)


def _pack(value: Any, path: str, first: dict[str, Any], *, learns: bool = False) -> Any:
    """Return the form of a value. first: objects without a form, which the script has made.

    learns: note those objects. Raises _Unknown: such an object is new.
    """
    if type(value) in ATOMS and type(value) is not ModuleType:
        return value
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        value = value.detach()
    try:
        if isinstance(value, list | tuple | deque | dict):
            if len(value) > (LONG if learns else _MOST):
                raise _Unknown(path, f"has {len(value)} elements")
            numbers = _numbers(value)
            return _pack_inside(value, path, first, learns=learns) if numbers is None else numbers
        if is_named(value):
            names = Names(value).read().items()
            inner = {n: _pack(v, f"{path}.{n}", first, learns=learns) for n, v in names}
            return Made(_kind_of(value), inner)
        return _leaf(value, path)
    except _Unknown as unknown:
        if unknown.args[0] != path:
            raise
        mark = _mark(value)
        if learns:
            first[path] = mark
        elif first.get(path) != mark:
            raise
        return Hole(path)


def _leaf(value: Any, path: str) -> Any:
    """Return a value that a state can hold. Raises _Unknown: it cannot."""
    if getattr(value, "nbytes", 0) > SMALL_BYTES:
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
    found: Any = None
    if is_iterator(kind_of(value)):
        found = repr(position_of(value))
    elif isinstance(value, torch.Tensor):
        found = print_of_tensor(value)
    elif isinstance(value, np.ndarray):
        found = digest_of(value)
    return id(value), found


def _pack_inside(value: Any, path: str, first: dict[str, Any], *, learns: bool) -> Any:
    """Return a container of the same kind with the forms of its elements."""
    kind: Any = type(value)
    found: Any
    if isinstance(value, dict):
        pairs = dict.items(value)
        found = {k: _pack(v, f"{path}.{k}", first, learns=learns) for k, v in pairs}
    else:
        found = [_pack(v, f"{path}.{i}", first, learns=learns) for i, v in enumerate(value)]
    if kind in (list, dict):
        return found
    if kind in (OrderedDict, Counter, tuple):
        return kind(found)
    if kind is deque:
        return deque(found, value.maxlen)
    if hasattr(kind, "_fields"):
        return kind(*found)
    return Held(f"{kind.__module__}:{kind.__qualname__}", found)


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


def _size_of(packed: Any) -> int:
    """Return about the bytes of a form."""
    if isinstance(packed, Made):
        return sum(map(_size_of, packed.names.values()))
    if isinstance(packed, Numbers):
        return int(packed.values.nbytes)
    if isinstance(packed, Held):
        return _size_of(packed.elements)
    if isinstance(packed, dict):
        return sum(map(_size_of, packed.values()))
    if isinstance(packed, _SEQUENCES):
        return sum(map(_size_of, packed))
    return int(getattr(packed, "nbytes", 0)) or (len(packed) if isinstance(packed, str) else 8)


def _unpacked(packed: Any, live: Any, path: str) -> Any:
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
        new = {k: _unpacked(v, was.get(k, MISSING), f"{path}.{k}") for k, v in packed.items()}
        if isinstance(live, dict):
            live.clear()
            live.update(new) if isinstance(live, OrderedDict) else dict.update(live, new)
            return live
        return type(packed)(new)
    if isinstance(packed, _SEQUENCES):
        had = list(live) if isinstance(live, _SEQUENCES) else []
        had += [MISSING] * (len(packed) - len(had))
        items = [
            _unpacked(each, old, f"{path}.{i}")
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
    new = {n: _unpacked(v, now.get(n, MISSING), f"{path}.{n}") for n, v in values}
    names.write(new, drops=[name for name in now if name not in new])
    return live
