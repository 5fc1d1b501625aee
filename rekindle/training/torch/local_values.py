"""Keep the variables of a frame, and the contents of what they hold, from before a block.

A block that a fault broke has assigned variables, appended to lists and added to sums. Before it
begins again, all of this returns.
"""

from __future__ import annotations

import dis
import functools
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from rekindle.errors import SessionError
from rekindle.rank.error_origin import is_of_library
from rekindle.training.torch import private

SMALL_BYTES = 64 << 10  # of a tensor with a copy
_LESSONS = 8  # blocks in which large tensors are watched
_DEEP = 2  # levels of containers and objects below a variable
_MOST = 1_000  # objects that are kept
_LONG = 1_000  # elements; of a longer list only the length is kept
_ASSIGN = ("STORE_NAME", "STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "DELETE_")
_CONTAINERS = (list, dict, set, deque)
_ATOMS = (int, float, str, bytes, type(None))


class LocalValues:
    """The variables that the code of one frame can assign, as they were when a block began.

    leave: objects that the Session keeps itself, or that may be lost.
    """

    def __init__(self, leave: Iterable[Any] = ()) -> None:
        self._left = {id(each) for each in leave}
        self._lessons = _LESSONS
        self._kept: list[dict[str, Any]] = []  # local and global variables
        self._contents: dict[int, _Contents] = {}
        self._tensors: dict[int, _Tensor] = {}

    def keep(self, frame: FrameType) -> None:
        """Keep the values. They hold no tensor with a grad_fn, whose graph is large."""
        local, shared = _assigned(frame.f_code)
        spaces = [(frame.f_locals, local), (frame.f_globals, shared)]
        self._kept = [
            {name: space[name] for name in names if name in space and not _has_graph(space[name])}
            for space, names in spaces
        ]
        self._keep_contents()

    def check(self) -> None:
        """Check, in the first blocks, that no large tensor has changed in place.

        Raises SessionError: one has, and a repeated block would change it twice.
        """
        if self._lessons == 0:
            return
        self._lessons -= 1
        for each in self._tensors.values():
            if each.copy is None and each.has_changed():
                raise SessionError(
                    f"the block changes {each.name} in place, so a repeated block would change it "
                    "twice: change a copy (such as x = x.add(1) instead of x.add_(1)), or give the "
                    "tensor to the Session, extra={...}"
                )

    def restore(self, frame: FrameType) -> None:
        """Set the variables and contents again. Call it inside of a trace function of the frame.

        Raises SessionError: a large tensor has changed in place.
        """
        spaces = frame.f_locals, frame.f_globals  # each read of f_locals forgets what was set in it
        for space, values in zip(spaces, self._kept, strict=True):
            for name, value in values.items():
                if space.get(name) is not value:
                    space[name] = value
        for contents in self._contents.values():
            contents.restore()
        self._lessons = max(self._lessons, 1)
        self.check()
        for tensor in self._tensors.values():
            tensor.restore()

    def leave(self) -> None:
        """Forget all values."""
        self._kept, self._contents, self._tensors = [], {}, {}

    def _keep_contents(self) -> None:
        before, self._contents = self._tensors, {}
        self._tensors = {}
        waiting = deque((name, v, 0) for values in self._kept for name, v in values.items())
        while waiting and len(self._contents) < _MOST:
            name, value, depth = waiting.popleft()
            if isinstance(value, torch.Tensor):
                self._keep_tensor(name, value, before.get(id(value)))
            elif id(value) not in self._contents and id(value) not in self._left:
                contents = _contents_of(value)
                if contents is not None:
                    self._contents[id(value)] = contents
                    if depth < _DEEP:
                        inner = contents.inner(name)
                        waiting.extend((path, each, depth + 1) for path, each in inner)

    def _keep_tensor(self, name: str, tensor: torch.Tensor, before: _Tensor | None) -> None:
        plain = type(tensor) is torch.Tensor and not tensor.is_inference()
        if not plain or tensor.requires_grad or id(tensor) in self._left:
            return  # for example a parameter; the Session keeps those of its model
        if before is None or before.tensor is not tensor:
            before = _Tensor(name, tensor)
        self._tensors[id(tensor)] = before
        before.keep()


@dataclass(slots=True)
class _Tensor:
    """A tensor without a gradient. copy: of a small one, made when it is kept again.

    The first block that has a tensor sees only its version: most tensors are batches, which the
    next block does not have.
    """

    name: str
    tensor: torch.Tensor
    copy: torch.Tensor | None = None
    version: int = -1

    def keep(self) -> None:
        """Keep the values of a small tensor."""
        if self.tensor.nbytes <= SMALL_BYTES and (self.copy is None or self.has_changed()):
            self.copy = self.tensor.clone()
        self.version = private.version_of(self.tensor)

    def has_changed(self) -> bool:
        """Return whether torch has counted a change since the last call of keep()."""
        return private.version_of(self.tensor) != self.version

    def restore(self) -> None:
        """Set the values again."""
        if self.copy is not None and self.has_changed():
            with torch.no_grad():
                self.tensor.copy_(self.copy)
            self.version = private.version_of(self.tensor)


@dataclass(slots=True)
class _Contents:
    """The contents of a container, or the attributes of an object. before: None for a long list."""

    thing: Any
    before: Any
    length: int

    def inner(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield what may have contents of its own, with a name."""
        before = self.before
        if isinstance(before, dict):
            of_object = not isinstance(self.thing, dict)
            pairs: Iterable[tuple[Any, Any]] = before.items()
        else:
            of_object, pairs = False, enumerate(before if isinstance(before, list) else ())
        for key, each in pairs:
            if not isinstance(each, _ATOMS):
                yield f"{name}.{key}" if of_object else f"{name}[{key!r}]", each

    def restore(self) -> None:
        """Set the contents again."""
        thing, before = self.thing, self.before
        if before is None:
            del thing[self.length :]
        elif isinstance(thing, list):
            thing[:] = before
        elif isinstance(thing, set | deque):
            thing.clear()
            thing.extend(before) if isinstance(thing, deque) else thing.update(before)
        else:
            now = thing if isinstance(thing, dict) else vars(thing)
            if before.keys() <= now.keys():
                for key in [key for key in now if key not in before]:
                    del now[key]
            else:
                now.clear()
            dict.update(now, before)  # that of a Counter would add


def _contents_of(value: Any) -> _Contents | None:
    """Return the contents of a container or of an object of the script; None: it has none."""
    kind: Any = type(value)
    if issubclass(kind, list) and len(value) > _LONG:
        return _Contents(value, None, len(value))
    if issubclass(kind, _CONTAINERS):
        if len(value) > _LONG:
            return None
        free = dict if issubclass(kind, dict) else set if issubclass(kind, set) else list
        copied = free(value)
        return _Contents(value, copied, len(value))
    if _is_plain_object(kind) and isinstance(getattr(value, "__dict__", None), dict):
        return _Contents(value, dict(vars(value)), 0)
    return None


@functools.cache
def _is_plain_object(kind: Any) -> bool:
    """Return whether a class of the script has objects with nothing but attributes."""
    if issubclass(kind, SimpleNamespace | Namespace):
        return True
    if issubclass(kind, type | ModuleType | torch.nn.Module | torch.optim.Optimizer):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ != "builtins" and not is_of_library(kind.__module__, file)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


@functools.cache
def _assigned(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the local variables that the code can assign, and of the global ones."""
    if code.co_flags & 2:  # a function: with optimized locals
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    else:
        local = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    shared = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    return frozenset(local), frozenset(shared)
