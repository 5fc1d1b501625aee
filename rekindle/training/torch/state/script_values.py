"""Know what a block of the script changes, so that a block that a fault broke can begin again.

A block has assigned variables, appended to lists, and added to sums in objects and arrays. Before
it begins again, all of this returns.
"""

from __future__ import annotations

import array
import enum
import functools
import itertools
import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Set
from types import FrameType, FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
import torch

from rekindle.errors import SessionError
from rekindle.training.torch import private
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.epoch_order import GENERATORS
from rekindle.training.torch.state.script_names import (
    ATOMS,
    LONG,
    MISSING,
    SMALL_BYTES,
    Names,
    has_names,
    is_named,
    is_of_script,
    kind_of,
    reads_later,
    roots_of,
)
from rekindle.training.torch.state.script_prints import (
    digest_of,
    is_iterator,
    is_wrapper,
    parts_of,
    position_of,
)

_LONGEST = 100_000  # elements of a container with a copy
_MOST = 5_000  # things of one search
_LESSONS = 8  # blocks in which all is compared; later ones are those of a power of two
_CONTAINERS = (list, dict, set, deque, bytearray, array.array)


class Thing(Protocol):
    """Something that a block can change, with the contents from before the block."""

    def inner(self) -> Iterable[tuple[Any, Any]]:
        """Yield what may be a thing as well, with a name."""

    def changes(self) -> bool:
        """Return whether it has changed so that it could not return. Call it after a block."""

    def restore(self) -> bool:
        """Set the contents again; False: they cannot return."""


class Blocks:
    """The contents of all variables from before a block.

    kept: objects that the Session keeps itself. ignore: objects that may be lost, or their names.
    """

    def __init__(self, kept: Iterable[Any] = (), ignore: Iterable[Any] = ()) -> None:
        kept, ignore = list(kept), list(ignore)
        self._modules = [each for each in kept if isinstance(each, torch.nn.Module)]
        left = (*(each for each in kept if not isinstance(each, torch.nn.Module)), *ignore)
        self._left = {id(each) for each in left if type(each) not in ATOMS}
        self._ignored = {each for each in ignore if isinstance(each, str)}
        self._number = 0  # blocks so far
        self._hot: set[str] = set()  # long containers that blocks change
        self._things: list[tuple[str, Thing]] = []

    def keep(self, frame: FrameType) -> None:
        """Keep the values of the frame, of its callers, and of the script's modules."""
        self._number += 1
        watched = is_watched(self._number)
        self._things, seen = [], set(self._left)
        waiting = deque(roots_of(frame, self._modules))
        while waiting and len(self._things) < _MOST:
            name, value = waiting.popleft()
            how = _how(kind_of(value))
            if how is None or id(value) in seen or name in self._ignored:
                continue
            seen.add(id(value))
            thing = how(value, watched or name in self._hot)
            if thing is None:
                continue
            if isinstance(value, FrameType):
                thing.leave_large(reads_later(frame) if value is frame else frozenset())
            self._things.append((name, thing))
            prefix = f"{name}." if name else ""
            waiting.extend(
                (f"{prefix}{key}", each) for key, each in thing.inner() if type(each) not in ATOMS
            )
        if waiting:
            raise SessionError(_too_many(name for name, _ in self._things))

    def check(self) -> None:
        """Check after a block that its changes could have returned.

        Raises SessionError: one could not.
        """
        for name, thing in self._things:
            if thing.changes():
                if not isinstance(thing, _Contents) or not thing.is_kept():
                    raise SessionError(_told(name, thing))
                self._hot.add(name)

    def restore(self) -> None:
        """Set all values again. Call it inside of a trace function of the frame.

        Raises SessionError: something has changed that cannot return.
        """
        lost = [(name, thing) for name, thing in self._things if not thing.restore()]
        if lost:
            raise SessionError(_told(*lost[0]))

    def leave(self) -> None:
        """Forget all values."""
        self._things = []


def _told(name: str, thing: Thing) -> str:
    if isinstance(thing, _Position):
        return (
            f"the block advances {name}, whose position does not return after a fault: iterate "
            "over both in session.batches(...), such as session.batches(lambda: zip(loader, "
            "other)), or make it inside of the block"
        )
    return (
        f"the block changes {name} in place, so a repeated block would change it twice: change a "
        "copy (such as x = x.add(1) instead of x.add_(1)), give it to the Session, extra={...}, or "
        f"list it in ignore=[{name!r}] if it may be lost"
    )


def _too_many(names: Iterable[str]) -> str:
    counts = Counter(name.partition(".")[0] for name in names)
    [(name, count)] = counts.most_common(1)
    return (
        f"the script's variables hold more than {_MOST} objects that a block could change, "
        f"{count} of them in {name}, and a copy before each block would take too long: give "
        f"{name} to the Session, extra={{...}}, or list it in ignore=[{name!r}] if no block "
        "changes it"
    )


class _Values:
    """The values of names. A tensor with a graph has only its numbers here."""

    def __init__(self, thing: Any, _: bool) -> None:
        self._names = Names(thing)
        values = self._names.read()
        self._graphs = {n: id(v) for n, v in values.items() if _has_graph(v)}
        self._before = values
        for name in self._graphs:
            values[name] = values[name].detach()

    def leave_large(self, read: Set[str]) -> None:
        """Leave out large tensors that had a graph, except those that the code may still read.

        A usual block sets them again. Their memory must then be free.
        """
        for name in self._graphs.keys() - read:
            if self._before[name].nbytes > SMALL_BYTES:
                del self._before[name]

    def inner(self) -> Iterable[tuple[str, Any]]:
        return self._before.items()

    def changes(self) -> bool:
        return False

    def restore(self) -> bool:
        now, before, graphs = self._names.read(), self._before, self._graphs
        changed = {n: v for n, v in before.items() if now.get(n, MISSING) is not v}
        for name in graphs.keys() & changed.keys():
            if id(now.get(name)) == graphs[name]:
                del changed[name]
        new = [name for name in now if name not in before and name not in graphs]
        if changed or new:
            self._names.write(changed, drops=new)
        return True


def _function(thing: FunctionType, watched: bool) -> _Values | None:
    return _Values(thing, watched) if is_named(thing) else None


def _class(thing: type, watched: bool) -> _Values | None:
    is_own = is_of_script(thing) and not issubclass(thing, enum.Enum)
    return _Values(thing, watched) if is_own else None


class _Contents:
    """The elements of a container. A long one has a copy only if `whole`."""

    def __init__(self, thing: Any, whole: bool) -> None:
        self.thing = thing
        self._length = len(thing)
        is_long = self._length > LONG
        self._before = _copied(thing) if not is_long or (whole and self.is_kept()) else None
        self._is_long = is_long

    def is_kept(self) -> bool:
        """Return whether such a container may have a copy."""
        return self._length <= _LONGEST

    def inner(self) -> Iterable[tuple[Any, Any]]:
        if self._is_long or isinstance(self.thing, bytearray | array.array):
            return ()
        before: Any = self._before
        return before.items() if isinstance(before, dict) else enumerate(before)

    def changes(self) -> bool:
        if not self._is_long or self._has_grown():
            return False
        if self._before is None:
            return len(self.thing) != self._length
        if isinstance(self.thing, set | bytearray | array.array):
            return bool(self.thing != self._before)
        return not all(map(operator.is_, _elements(self._before), _elements(self.thing)))

    def _has_grown(self) -> bool:
        """Return whether only new elements at the end are likely: they can go."""
        grows = isinstance(self.thing, list | dict | bytearray)
        before, now = self._before, self.thing
        return grows and (
            len(now) > self._length
            and (before is None or all(map(operator.is_, _elements(before), _elements(now))))
        )

    def restore(self) -> bool:
        thing, before = self.thing, self._before
        if before is not None:
            _fill(thing, before)
        elif self._has_grown():
            for _ in range(len(thing) - self._length):
                thing.popitem() if isinstance(thing, dict) else thing.pop()
        return before is not None or len(thing) == self._length


class _Tensor:
    """A tensor without a gradient. A large one has no copy, and shows changes by its version."""

    def __init__(self, thing: torch.Tensor, _: bool) -> None:
        plain = type(thing) is torch.Tensor and not thing.is_inference()
        # The Session keeps parameters; torch counts no changes of the others.
        self._tensor = thing if plain and not thing.requires_grad else None
        self._copy: torch.Tensor | None = None
        if self._tensor is not None:
            self._version = private.version_of(thing)
            if thing.nbytes <= SMALL_BYTES:
                self._copy = thing.clone()

    def inner(self) -> Iterable[tuple[Any, Any]]:
        return ()

    def changes(self) -> bool:
        tensor = self._tensor
        if tensor is None or self._copy is not None:
            return False
        return bool(private.version_of(tensor) != self._version)

    def restore(self) -> bool:
        tensor = self._tensor
        if tensor is None:
            return True
        if self._copy is None and private.version_of(tensor) == self._version:
            return True
        if self._copy is not None:
            with torch.no_grad():
                tensor.copy_(self._copy)
        return self._copy is not None


class _Array:
    """An array of NumPy. A large one has no copy; `watched` finds its changes."""

    def __init__(self, thing: np.ndarray[Any, Any], watched: bool) -> None:
        self._array = thing
        self._copy = thing.copy() if thing.nbytes <= SMALL_BYTES else None
        watched = watched and self._copy is None and not thing.dtype.hasobject
        self._digest = digest_of(thing) if watched and thing.flags.writeable else None

    def inner(self) -> Iterable[tuple[Any, Any]]:
        return ()

    def changes(self) -> bool:
        return self._digest is not None and digest_of(self._array) != self._digest

    def restore(self) -> bool:
        if self._copy is not None and self._array.flags.writeable:
            self._array[...] = self._copy
        return not self.changes()


class _Generator:
    """A generator of random numbers."""

    def __init__(self, thing: Any, _: bool) -> None:
        # A block has its own numbers of those of the process.
        is_own = any(thing is each for each in rng.GLOBAL.values())
        self._generator = None if is_own else thing
        self._state = None if is_own else rng.state_of(thing)

    def inner(self) -> Iterable[tuple[Any, Any]]:
        return ()

    def changes(self) -> bool:
        return False

    def restore(self) -> bool:
        if self._generator is not None:
            rng.set_state(self._generator, self._state)
        return True


class _Position:
    """An iterator that the script advances."""

    def __init__(self, thing: Any, _: bool) -> None:
        self._iterator = thing
        self._position = position_of(thing)

    def inner(self) -> Iterable[tuple[Any, Any]]:
        return ()

    def changes(self) -> bool:
        return bool(position_of(self._iterator) != self._position)

    def restore(self) -> bool:
        return not self.changes()


class _Inside:
    """A value that shows no change of its own, with others in it."""

    def __init__(self, thing: Any, _: bool) -> None:
        inside = thing if isinstance(thing, tuple | frozenset) else tuple(parts_of(thing))
        self._inside = inside if len(inside) <= LONG else ()

    def inner(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._inside)

    def changes(self) -> bool:
        return False

    def restore(self) -> bool:
        return True


def is_watched(number: int) -> bool:
    """Return whether in this block, counted from 1, long containers and arrays are compared."""
    return number <= _LESSONS or number & (number - 1) == 0


@functools.cache
def _how(kind: Any) -> Callable[[Any, bool], Any] | None:
    """Return how the values of a class change; None: no change shows."""
    if issubclass(kind, torch.Tensor):
        return _Tensor
    if issubclass(kind, np.ndarray):
        return _Array
    if issubclass(kind, GENERATORS):
        return _Generator
    if issubclass(kind, _CONTAINERS):
        return _Contents
    if issubclass(kind, tuple | frozenset | MethodType | functools.partial) or is_wrapper(kind):
        return _Inside
    if kind is FunctionType:
        return _function
    if issubclass(kind, type):
        return _class
    if is_iterator(kind):
        return _Position
    return _Values if has_names(kind) else None


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _elements(container: Any) -> Iterable[Any]:
    """Return the elements, or the keys and values of a mapping."""
    if isinstance(container, dict):
        return itertools.chain.from_iterable(dict.items(container))
    found: Iterable[Any] = container
    return found


def _copied(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, bytearray | array.array):
        return container[:]
    return set(container) if isinstance(container, set) else list(container)


def _fill(container: Any, before: Any) -> None:
    """Set the contents of a container."""
    if isinstance(container, list | bytearray | array.array):
        container[:] = before
    elif isinstance(container, deque):
        container.clear()
        container.extend(before)
    elif isinstance(container, OrderedDict | set):
        container.clear()
        container.update(before)
    elif [k for k in container if k in before] == list(before):
        # In the same order. Other threads may read the variables of a module.
        for key in [key for key in container if key not in before]:
            dict.__delitem__(container, key)
        dict.update(container, before)  # that of a Counter would add
    else:
        dict.clear(container)
        dict.update(container, before)
