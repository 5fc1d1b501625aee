"""Let the block of a `with` statement begin again, with the variables from before it.

Python allows a trace function to set `frame.f_lineno`: debuggers jump with it. A trace function
sees the next event of the frame, jumps, and gives tracing back to its former user.

A block that a fault broke has assigned variables, appended to lists and added to sums. Before it
begins again, all of this returns.
"""

from __future__ import annotations

import ast
import ctypes
import dis
import functools
import linecache
import sys
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from rekindle.errors import SessionError
from rekindle.rank.error_origin import is_of_library
from rekindle.training.torch import private

_STATEMENT = (
    "there is no statement after `with session.step():` in its function, so the block could not "
    "begin again after a fault: put a statement after the block, such as `return loss`, and do "
    "not return inside the block"
)
_FIRST = (
    "the block of `with session.step():` could not begin again after a fault: make session.step() "
    "the first item of its `with` statement, and put no other `with` statement directly around it"
)
_ENTER = ("setup_with", "before_with")  # instructions that enter an item
SMALL_BYTES = 64 << 10  # of a tensor with a copy
_LESSONS = 8  # blocks in which large tensors are watched
_DEEP = 2  # levels of containers and objects below a variable
_MOST = 1_000  # objects that are kept
_LONG = 1_000  # elements; of a longer list only the length is kept
_CONTAINERS = (list, dict, set, deque)
_ATOMS = (bool, int, float, str, bytes, type(None))


class Repeat:
    """The `with` statement in which the script's code is, or was last.

    frame: its frame.
    """

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self._line = 0
        self._checked: set[tuple[CodeType, int]] = set()  # statements, by their lines

    def enter(self, frame: FrameType) -> bool:
        """Enter the statement of this frame, in its `__enter__`; True: for the first time.

        Raises SessionError: the block could not begin again, because of other items or statements.
        """
        self.frame, self._line = frame, frame.f_lineno
        if (frame.f_code, self._line) in self._checked:
            return False
        _check_place(frame)
        return True

    def check(self) -> None:
        """Check that the block could begin again. Call it in `__exit__`, after the first success.

        The next event of the frame then raises a SessionError if there is no line after the block.
        """
        frame = self._frame()
        site = frame.f_code, self._line

        def done(_: FrameType) -> None:
            self._checked.add(site)

        _at_next_line(frame, done, jumps=False)

    def again(self, before: Callable[[FrameType], None]) -> None:
        """Begin the block again. Call it in `__exit__`, which then returns True.

        before: is called with the frame before the jump; it may change variables in `f_locals`.
        """
        frame, line = self._frame(), self._line

        def jump(here: FrameType) -> None:
            before(here)
            with warnings.catch_warnings():
                # Python 3.12 and later set variables without a value to None, with a warning.
                warnings.simplefilter("ignore", RuntimeWarning)
                try:
                    here.f_lineno = line  # type: ignore[misc]  # typeshed: it is read-only
                except ValueError as error:
                    raise SessionError(f"{_FIRST} ({error})") from error

        _at_next_line(frame, jump, jumps=True)

    def leave(self) -> None:
        """Forget the frame, which holds the variables of the script."""
        self.frame = None

    def _frame(self) -> FrameType:
        assert self.frame is not None
        return self.frame


def _at_next_line(frame: FrameType, do: Callable[[FrameType], None], *, jumps: bool) -> None:
    """Call a function at the next line of the frame, inside of a trace function.

    jumps: this line does not run. The frame raises SessionError if it ends before.
    """
    former, own = sys.gettrace(), frame.f_trace

    def trace(here: FrameType, event: str, argument: Any) -> Any:
        if event == "call":  # of a generator that continues
            return trace
        try:
            if event == "return":
                raise SessionError(_STATEMENT)
            if event == "line":
                do(here)
        finally:
            here.f_trace = own
            sys.settrace(former)
        return own(here, event, argument) if own is not None and not jumps else own

    frame.f_trace = trace
    sys.settrace(lambda *_: None)  # an event needs a function of the thread; it traces nothing


def _check_place(frame: FrameType) -> None:
    """Check the place of the `with` statement that the frame enters.

    Raises SessionError: other items are before this one, or another `with` statement ends with this
    one. At the next line, Python would still be inside of the items, or outside of the statement.
    """
    line, code = frame.f_lineno, frame.f_code
    lines = {start: number for start, _, number in code.co_lines()}
    here = None
    for each in dis.get_instructions(code):
        here = lines.get(each.offset, here)
        if each.opname.lower() in _ENTER and here == line and each.offset < frame.f_lasti:
            raise SessionError(_FIRST)
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the file has changed, or has no source
        return
    _check_statements(tree.body, line, ends=False)


def _check_statements(body: list[ast.stmt], line: int, *, ends: bool) -> None:
    """Check the statement with this line. ends: another statement ends after the last of `body`."""
    for number, each in enumerate(body):
        if not each.lineno <= line <= (each.end_lineno or each.lineno):
            continue
        last = number == len(body) - 1 and ends
        if isinstance(each, ast.With):
            spans = [(i.context_expr.lineno, i.context_expr.end_lineno) for i in each.items]
            inside = [first <= line <= (end or first) for first, end in spans]
            if any(inside) and (last or not inside[0]):
                raise SessionError(_FIRST)
        left = isinstance(each, ast.With | ast.ExceptHandler)
        stays = isinstance(each, ast.For | ast.While | ast.FunctionDef | ast.ClassDef)
        finishes = bool(getattr(each, "finalbody", []) or getattr(each, "orelse", []))
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(each, field, [])
            deeper = not stays and (left or (last and not (field == "body" and finishes)))
            if field in ("handlers", "cases"):
                for one in inner:
                    _check_statements(one.body, line, ends=field == "handlers" or last)
            else:
                _check_statements(inner, line, ends=deeper)


class LocalValues:
    """The variables that the code of one frame can assign, as they were when a block began.

    leave: objects that the Session keeps itself, or that may be lost.
    """

    def __init__(self, leave: Iterable[Any] = ()) -> None:
        self._left = {id(each) for each in leave}
        self._lessons = _LESSONS
        self._kept: list[dict[str, Any]] = []  # local and global variables
        self._contents: dict[int, tuple[str, _Contents]] = {}  # with their paths
        self._tensors: dict[int, _Tensor] = {}
        self._plain: dict[str, Any] = {}
        self._moving: set[str] = set()

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
        for _, contents in self._contents.values():
            contents.restore()
        self._lessons = max(self._lessons, 1)
        self.check()
        for tensor in self._tensors.values():
            tensor.restore()

    def moving(self, frame: FrameType) -> dict[str, Any]:
        """Return the plain values that differ from those at an earlier call, such as `meter.total`.

        They are numbers, texts, lists of them, and the bytes of small tensors on the CPU.
        """
        self.keep(frame)
        again = _loop_names(frame.f_code.co_filename, frame.f_code.co_firstlineno)
        found = {path: value for path, value, _, _ in self._places() if path not in again}
        before, self._plain = self._plain, found
        self._moving |= {n for n, v in found.items() if n in before and before[n] != v}
        return {name: found[name] for name in self._moving & found.keys()}

    def fill(self, frame: FrameType, values: Mapping[str, Any]) -> None:
        """Set values of moving(). The frame waits for the caller. Other values are left out."""
        self.keep(frame)
        places = {path: (owner, key) for path, _, owner, key in self._places()}
        names, shared = _assigned(frame.f_code)
        local = frame.f_locals
        for path, value in values.items():
            owner, key = places.get(path, (None, path))
            if isinstance(owner, torch.Tensor):
                owner.copy_(torch.frombuffer(value, dtype=owner.dtype).view(owner.shape))
            elif isinstance(owner, list):
                owner[:] = value
            elif owner is not None:
                owner[key] = value
            elif path in names:
                local[path] = value
            elif path in shared:
                frame.f_globals[path] = value
        if sys.version_info < (3, 13):  # later, f_locals writes through
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def _places(self) -> Iterator[tuple[str, Any, Any, str]]:
        """Yield each plain value: its path, the value, its owner and its name there."""
        for values in self._kept:
            yield from ((n, v, None, n) for n, v in values.items() if type(v) in _ATOMS)
        for path, contents in self._contents.values():
            thing, before = contents.thing, contents.before
            if isinstance(thing, list) and before and all(type(v) in _ATOMS for v in before):
                yield path, before, thing, ""
            elif isinstance(before, dict):
                owner = thing if isinstance(thing, dict) else vars(thing)
                pairs = ((k, v) for k, v in before.items() if type(v) in _ATOMS)
                yield from ((f"{path}.{key}", value, owner, key) for key, value in pairs)
        for each in self._tensors.values():
            # A batch has the version 0.
            if each.copy is not None and each.version and each.tensor.is_cpu:
                memory = each.copy.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                yield each.name, memory, each.tensor, ""

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
                    self._contents[id(value)] = name, contents
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
        pairs: Iterable[tuple[Any, Any]] = before.items() if isinstance(before, dict) else ()
        if isinstance(before, list):
            pairs = enumerate(before)
        yield from ((f"{name}.{key}", v) for key, v in pairs if not isinstance(v, _ATOMS))

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
        local = {i.argval for i in dis.get_instructions(code) if i.opname.lower() == "store_name"}
    shared = {i.argval for i in dis.get_instructions(code) if i.opname.lower() == "store_global"}
    return frozenset(local), frozenset(shared)


@functools.cache
def _loop_names(file: str, first: int) -> frozenset[str]:
    """Return the variables that `for` loops of a function or module set, also in a new process."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    roots: list[ast.AST] = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.lineno == first]
    loops = (n for root in roots or [tree] for n in ast.walk(root) if isinstance(n, ast.For))
    names = (n for each in loops for n in ast.walk(each.target))
    return frozenset(n.id for n in names if isinstance(n, ast.Name))
