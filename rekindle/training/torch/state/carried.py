"""Find variables of the script that carry values from step to step, and that no state has.

A replaced rank would begin with their first values, and a repeated step would change them twice.
The search compares the variables at the first requests for a step (`session.steps`). A variable
that each step sets before it reads it carries nothing.
"""

from __future__ import annotations

import ast
import datetime
import dis
import functools
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from rekindle.errors import SessionError
from rekindle.training.sampler import StepSampler
from rekindle.training.torch import private
from rekindle.training.torch.data.epoch_order import GENERATORS
from rekindle.training.torch.state.forgotten import LAST, digest_of_some
from rekindle.training.torch.state.script_names import (
    ATOMS,
    LONG,
    Names,
    has_names,
    is_of_script,
    kind_of,
    modules_of_script,
    reads_in_loop,
    roots_of,
    stack_of,
)
from rekindle.training.torch.state.script_prints import (
    digest_of,
    is_iterator,
    parts_of,
    position_of,
)

_MOST = 20_000  # values that a search visits
_SLACK_S = 1.0  # between a look and the code around it
_CLOCKS: tuple[Callable[[], float], ...] = (
    *(time.time, time.perf_counter, time.monotonic),
    *(time.time_ns, time.perf_counter_ns, time.monotonic_ns),
)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Kinds: TypeAlias = tuple[type[ast.AST], ...]
_LISTED = 8  # names in an error
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class Value(NamedTuple):
    """The value that a search has found at a place.

    - `how`: its holder: `name`, `attribute`, `entry` (of a dict), `element`, or `other` (a name
      that another function sets).
    - `mark`: differs if it is another value. `contents`: differ if it has changed in place.
    - `inner`: the values in it.
    """

    how: str
    mark: Any
    contents: Any
    inner: Mapping[Any, Value]
    is_iterator: bool = False


class Carried:
    """The search in one rank.

    kept: the objects that the Session keeps. ignore: objects that may be lost, or their names.
    """

    def __init__(self, kept: Iterable[Any], ignore: Iterable[Any]) -> None:
        ignored = list(ignore)
        self._names = {each for each in ignored if isinstance(each, str)}
        self._kept = [each for each in kept if each is not None]
        self._ignored = [each for each in ignored if type(each) not in ATOMS]
        self._bound: dict[str, Set[str]] = {}  # the names that exist before the loop, by root
        self._before: dict[str, dict[str, Value]] = {}
        self._at, self._last = 0.0, -2  # the time and the step of the newest look
        self._steady = 0  # looks since the first one, or since a step that was repeated
        self._looks = 0

    def look(self, step: int, compared: int) -> None:
        """Compare the variables with those of the last request. Call it before this step.

        The first step may make what all others use, and so may a repeated one. compared: the steps
        that a job has compared before; after LAST of them nothing is compared.
        Raises SessionError: a variable carries a value from step to step.
        """
        if self._looks > LAST or (self._looks == 0 and compared >= LAST):
            return
        self._looks += 1
        now = self._search()
        self._steady = self._steady + 1 if step == self._last + 1 else 0
        before, self._before, self._last = self._before, {} if self._looks > LAST else now, step
        found: dict[str, bool] = {}
        since_s, self._at = time.monotonic() - self._at, time.monotonic()
        for root, names in now.items() if self._steady > 1 else ():
            for name in names.keys() & before.get(root, {}).keys():
                found |= _changes(name, before[root][name], names[name], since_s + _SLACK_S)
        found = {n: moves for n, moves in found.items() if not self._is_ignored(n)}
        if found:
            raise SessionError(_told(found, step - 1))

    def _search(self) -> dict[str, dict[str, Value]]:
        """Return the values of all names by root. A root has the same text at each look."""
        search = _Search(self._kept, self._ignored)
        modules = {id(each): each for each in self._kept if isinstance(each, torch.nn.Module)}
        frame, count = sys._getframe(), Counter[str]()
        reads = {id(each.f_locals): reads_in_loop(each) for each in stack_of(frame)}
        roots: dict[str, dict[str, Value]] = {}
        for prefix, thing in roots_of(frame, modules.values()):
            is_frame, is_part = isinstance(thing, FrameType), isinstance(thing, torch.nn.Module)
            if is_part and private.has_extra_state(thing):
                continue  # its attributes are a part of the state, if they matter
            count[prefix] += 1
            root = f"{prefix} {count[prefix]}"
            start, how = f"{prefix}." if prefix else "", "attribute" if is_part else "name"
            names = {f"{start}{n}": v for n, v in Names(thing).read().items()}
            bound = self._bound.setdefault(root, names.keys() | set())
            read = reads.get(id(thing.f_locals if is_frame else thing))
            chosen = names if read is None else {n: v for n, v in names.items() if n in read}
            found = {n: search.value(v, how) for n, v in chosen.items()}
            # A new process would have no other names, but it makes an iterator again.
            roots[root] = {n: v for n, v in found.items() if is_part or n in bound or v.is_iterator}
        return roots

    def _is_ignored(self, name: str) -> bool:
        return not self._names.isdisjoint((name, name.partition(".")[0].partition("[")[0]))


class _Search:
    """One search. It leaves out the kept objects and the objects in them."""

    def __init__(self, kept: Iterable[Any], ignored: Iterable[Any]) -> None:
        self._seen = {id(each) for each in ignored}
        self._storages: set[int] = set()
        self._left = _MOST
        waiting = deque(kept)
        while waiting and len(self._seen) < _MOST:
            each = waiting.popleft()
            if type(each) in ATOMS or id(each) in self._seen:
                continue
            self._seen.add(id(each))
            if isinstance(each, torch.Tensor):
                self._add(each)
            elif isinstance(each, torch.nn.Module):
                for tensor in (*each.parameters(), *each.buffers()):
                    self._add(tensor)
            elif isinstance(each, torch.optim.Optimizer):  # its state has no parameters
                waiting.extend([each.param_groups, *each.param_groups, *each.state.values()])
                self._seen |= {id(group["params"]) for group in each.param_groups}
            elif isinstance(each, _CONTAINERS):
                if len(each) <= LONG:
                    waiting.extend(each.values() if isinstance(each, dict) else each)
            elif not type(each).__module__.startswith("rekindle."):
                waiting.extend(getattr(each, "__dict__", {}).values())

    def _add(self, tensor: torch.Tensor) -> None:
        """Leave out a tensor, its gradient, and all that shares their memory."""
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None:
                self._storages |= {id(each), *_storage_of(each)}

    def value(self, value: Any, how: str) -> Value:
        """Return the value with those in it. how: its holder."""
        kind = kind_of(value)
        if kind in ATOMS:
            return Value(how, None if issubclass(kind, ModuleType) else repr(value), None, {})
        if isinstance(value, torch.Tensor):
            return self._tensor(value, how)
        self._left -= 1
        if id(value) in self._seen or self._left < 0 or isinstance(value, GENERATORS):
            return Value(how, None, None, {})
        if isinstance(value, datetime.datetime | datetime.timedelta):
            return Value(how, None, None, {})  # of a clock
        if isinstance(value, np.ndarray):
            return Value(how, id(value), digest_of(value), {})
        if is_iterator(kind) and isinstance(private.index_sampler_of(value), StepSampler):
            return Value(how, None, None, {})  # the Session keeps its position
        if is_iterator(kind):
            return Value(how, id(value), repr(position_of(value)), {}, is_iterator=True)
        self._seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            return self._container(value, how)
        is_own = isinstance(value, type) and is_of_script(value)
        held: dict[Any, Value] = {}
        if isinstance(value, FunctionType):
            sets = _set_by(value)
            pairs = Names(value).read().items()
            held = {n: self.value(v, "name" if n in sets else "other") for n, v in pairs}
        elif is_own or has_names(kind):
            held = {n: self.value(v, "attribute") for n, v in Names(value).read().items()}
        held |= {n: self.value(v, "element") for n, v in enumerate(parts_of(value))}
        return Value(how, id(value), None, held)

    def _tensor(self, tensor: torch.Tensor, how: str) -> Value:
        if not self._storages.isdisjoint((id(tensor), *_storage_of(tensor))):
            return Value(how, None, None, {})
        return Value(how, id(tensor), digest_of_some([tensor]), {})

    def _container(self, value: Any, how: str) -> Value:
        if len(value) > LONG:
            return Value(how, id(value), len(value), {})
        if isinstance(value, tuple):  # the script sets another one
            held = {n: self.value(v, how) for n, v in enumerate(value)}
            return Value(how, len(value), None, held)
        is_dict = isinstance(value, dict)
        inner = "entry" if is_dict else "element"
        # A copy, because another thread may change the container meanwhile.
        pairs = [*value.items()] if is_dict else [*enumerate([*value])]
        held = {k if type(k) in ATOMS else id(k): self.value(v, inner) for k, v in pairs}
        return Value(how, id(value), list(held), held)


def _set_by(function: FunctionType) -> set[str]:
    """Return the variables of a closure that the function sets."""
    steps = dis.get_instructions(function.__code__)
    return {each.argval for each in steps if each.opname.lower() == "store_deref"}


def _storage_of(tensor: torch.Tensor) -> Iterator[int]:
    """Yield a number that only tensors with the same memory share, if it is known."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided:
        yield private.storage_id(local)


# ---- what has changed


def _changes(place: str, before: Value, now: Value, since_s: float) -> dict[str, bool]:
    """Return the places that carry a value into the next step; True: it is an iterator's position.

    since_s: seconds between the two looks.
    """
    if before.mark != now.mark:
        if now.how == "other" or _is_time(now.mark, since_s):
            return {}
        holder = {"attribute": place, "entry": place.rpartition("[")[0]}.get(now.how)
        kinds = (ast.Attribute,) if now.how == "attribute" else (ast.Attribute, ast.Name)
        own = holder is None or is_set_from_itself(re.split(r"[.\[]", holder)[-1], kinds)
        return {place: False} if own else {}
    if before.contents != now.contents:
        return {place: now.is_iterator}
    found: dict[str, bool] = {}
    for key in before.inner.keys() & now.inner.keys():
        inner = now.inner[key]
        is_element = inner.how in ("element", "entry")
        deeper = f"{place}[{key}" if is_element else f"{place}.{key}"
        changed = _changes(deeper, before.inner[key], inner, since_s)
        found |= {place: any(changed.values())} if is_element and changed else changed
    return found


def _is_time(mark: Any, since_s: float) -> bool:
    """Return whether a value is one that a clock has shown since the last look."""
    try:
        value = float(mark) if isinstance(mark, str) else None
    except ValueError:
        return False
    if value is None:
        return False
    units = (1.0,) * 3 + (1e9,) * 3
    return any(
        0 <= clock() - value <= since_s * unit for clock, unit in zip(_CLOCKS, units, strict=True)
    )


@functools.cache
def is_set_from_itself(name: str, kinds: _Kinds) -> bool:
    """Return whether a function of the script reads this attribute or dict before it sets it.

    kinds: of the nodes that the name can have.

    Others get a new value in each step, such as an auxiliary loss of the model, and the activations
    that hooks keep.
    """

    def is_it(tree: ast.AST) -> bool:
        return isinstance(tree, kinds) and getattr(tree, "attr", getattr(tree, "id", "")) == name

    word = re.compile(rf"\b{re.escape(name)}\b")
    for module in modules_of_script().values():
        for tree in _trees_of(str(vars(module).get("__file__")), word):
            for each in ast.walk(tree):
                if isinstance(each, _SCOPES):
                    uses = [
                        use for part in ast.iter_child_nodes(each) for use in _uses(part, is_it)
                    ]
                    if "set" in uses and uses[0] == "read":
                        return True
    return False


def _trees_of(file: str, word: re.Pattern[str]) -> Iterator[ast.AST]:
    """Yield the tree of a file in which the word occurs."""
    try:
        with open(file, encoding="utf-8") as source:
            text = source.read()
        if word.search(text):
            yield ast.parse(text)
    except (OSError, ValueError, SyntaxError):  # it has no source, or its text has changed
        return


def _uses(tree: ast.AST, is_it: Callable[[ast.AST], bool]) -> Iterator[str]:
    """Yield `read` and `set` for each use of the name, in the order of their execution.

    A new entry of a dict sets the dict. Functions inside of this one are others.
    """
    if isinstance(tree, _SCOPES):
        return
    parts: list[ast.AST] = list(ast.iter_child_nodes(tree))
    if isinstance(tree, ast.Assign):
        parts = [tree.value, *tree.targets]
    elif isinstance(tree, ast.AugAssign):
        parts = [tree.value, tree.target]
        if is_it(_holder(tree.target)):
            yield "read"
    elif isinstance(tree, ast.Subscript) and not isinstance(tree.ctx, ast.Load):
        if is_it(tree.value):
            yield from _uses(tree.slice, is_it)
            yield "set"
            return
    for each in parts:
        yield from _uses(each, is_it)
    if is_it(tree):
        yield "read" if isinstance(getattr(tree, "ctx", None), ast.Load) else "set"


def _holder(target: ast.AST) -> ast.AST:
    return target.value if isinstance(target, ast.Subscript) else target


def _told(found: Mapping[str, bool], step: int) -> str:
    names = sorted(found)
    first = ", ".join(names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    text = (
        f"step {step} changed {first}{more}, which the next step reads and the Session does not "
        "keep, so a rank that is replaced would begin again with the first values. "
    )
    if any(found.values()):
        text += "Give a loader to the Session, loader=..., and use step.batch instead of next(). "
    return text + (
        "Compute values from step.number, put them into a dict or another object in extra={...}, "
        "or use session.epochs(), which keeps variables. What may be lost, give as "
        f"ignore=[{', '.join(map(repr, names[:_LISTED]))}]"
    )
