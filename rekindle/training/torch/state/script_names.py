"""Find the names that a script can set, and those that it may still read.

The search begins at the functions of the script that run now, and at the modules of the script.
"""

from __future__ import annotations

import bisect
import ctypes
import dis
import enum
import functools
import io
import re
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

import rekindle
from rekindle.rank.error_origin import is_of_library

# Objects with a state that the Session keeps or refuses, data, and what other threads change.
_OTHERS: tuple[Any, ...] = (
    *(torch.optim.Optimizer, LRScheduler, Dataset, DataLoader, Sampler),
    *(io.IOBase, enum.Enum, BaseException, threading.Thread),
)
_OF_MODULE = frozenset(vars(torch.nn.Module()))
_OURS = str(Path(rekindle.__file__).parent)  # the fork server runs as the main module
_USES = re.compile("(LOAD|STORE|DELETE)_(?:FAST|NAME|DEREF|CLASSDEREF|CLOSURE|GLOBAL)")
_ENDS = re.compile("RETURN|RAISE|RERAISE|JUMP_(?:FORWARD|BACKWARD|ABSOLUTE)")  # no next instruction
_OF_WITH, _OF_TRY = re.compile("WITH_EXCEPT_START$"), re.compile("SETUP_FINALLY$")
MISSING = object()  # instead of the value of a name that has none
ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None), range, ModuleType))
LONG = 1_000  # elements; a longer container is compared and copied only when it is necessary
SMALL_BYTES = 64 << 10  # of a tensor or an array with a copy


class Names:
    """Names with values that the script can set.

    thing: an object, a class, a function (the variables of its closure), a function that runs (a
    frame), or the dict of a module.
    """

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def read(self) -> dict[str, Any]:
        """Return the values by name. Another thread may set names meanwhile."""
        thing = self.thing
        if isinstance(thing, FrameType):
            return dict(thing.f_locals)
        if isinstance(thing, dict):
            return {n: v for n, v in [*thing.items()] if not n.startswith("__")}
        if isinstance(thing, FunctionType):
            cells = {name: _in_cell(cell) for name, cell in _cells_of(thing).items()}
            held = {n: v for n, v in cells.items() if v is not MISSING} | thing.__dict__
            return held | defaults_of(thing)
        if isinstance(thing, type):
            return {n: v for n, v in [*vars(thing).items()] if _is_data(n, v)}
        slots = {name: getattr(thing, name, MISSING) for name in _slots_of(kind_of(thing))}
        found = {n: v for n, v in slots.items() if v is not MISSING}
        inside = getattr(thing, "__dict__", {})
        if isinstance(thing, torch.nn.Module):
            return {n: v for n, v in [*inside.items()] if n not in _OF_MODULE}
        return found | inside

    def write(self, values: Mapping[str, Any], *, drops: Iterable[str] = ()) -> None:
        """Set these values, and remove the names in `drops`.

        A frame, a closure and a module keep all names.
        """
        thing = self.thing
        if isinstance(thing, FrameType):
            local = thing.f_locals  # each read of it forgets what was set in it
            for name, value in values.items():
                local[name] = value
            if sys.version_info < (3, 13):  # later, f_locals writes through
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(thing), ctypes.c_int(0))
            return
        if isinstance(thing, dict):
            thing.update(values)
            return
        cells = _cells_of(thing) if isinstance(thing, FunctionType) else {}
        usual = isinstance(thing, type | FunctionType)
        put = setattr if usual else object.__setattr__  # the second: also of a frozen class
        drop = delattr if usual else object.__delattr__
        for name in drops:
            if name not in cells:
                drop(thing, name)
        for name, value in values.items():
            if name in cells:
                cells[name].cell_contents = value
            else:
                put(thing, name, value)


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the default arguments of a function, if its calls can change one of them."""
    held = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
    return {n: v for n, v in held.items() if v and any(_can_change(each) for each in _values(v))}


def _values(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def _can_change(value: Any) -> bool:
    return isinstance(value, list | dict | set | deque | torch.Tensor) or has_names(kind_of(value))


def kind_of(value: Any) -> Any:
    """Return the class of a value, for a function with a cache."""
    return type(value)


@functools.cache
def has_names(kind: Any) -> bool:
    """Return whether values of a class have names that the script can set."""
    if issubclass(kind, SimpleNamespace | Namespace | FrameType):
        return True
    if issubclass(kind, _OTHERS):
        return False
    return is_of_script(kind)


@functools.cache
def is_of_script(kind: Any) -> bool:
    """Return whether the script defines this class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    ours = file.startswith(_OURS)
    return kind.__module__ != "builtins" and not ours and not is_of_library(kind.__module__, file)


def stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the functions of the script that run now: this one, then those that called it."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and not is_of_library(_module_of(frame), file):
            yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def modules_of_script() -> dict[str, ModuleType]:
    """Return the modules of the script by name."""
    return _modules(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _modules(_: int) -> dict[str, ModuleType]:
    found = {}
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType):
            file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
            named = isinstance(file, str) and file and not file.startswith(_OURS)
            if named and not is_of_library(name, str(file)):
                found[name] = module
    return found


def roots_of(frame: FrameType, modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield where a search begins: running functions, variables of modules, and parts of `modules`.

    The functions are those of the script that lead to `frame`.
    """
    spaces: dict[int, tuple[str, Any]] = {}
    for each in stack_of(frame):
        spaces.setdefault(id(each.f_globals), ("", each.f_globals))
        if each.f_locals is not each.f_globals:
            yield "", each
    for name, module in modules_of_script().items():
        spaces.setdefault(id(vars(module)), ("" if name == "__main__" else name, vars(module)))
    yield from spaces.values()
    for model in modules:
        for name, part in model.named_modules():
            if is_of_script(kind_of(part)):
                yield f"model.{name}" if name else "model", part


def _cells_of(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _in_cell(cell: CellType) -> Any:
    return cell.cell_contents if cell != CellType() else MISSING


def _is_data(name: str, value: Any) -> bool:
    """Return whether a name of a class is no method, and none of Python's own."""
    return not name.startswith("__") and not hasattr(type(value), "__get__")


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def is_named(value: Any) -> bool:
    """Return whether a value has names that the script can set, and is no module of torch."""
    if isinstance(value, FunctionType):
        return bool(value.__closure__ or value.__dict__ or defaults_of(value))
    if isinstance(value, type):
        return is_of_script(value)
    return has_names(kind_of(value)) and not isinstance(value, FrameType | torch.nn.Module)


def reads_later(frame: FrameType) -> frozenset[str]:
    """Return the variables whose present value the code after the frame's place may read."""
    return _reads_later(frame.f_code, frame.f_lasti)


def reads_in_loop(frame: FrameType) -> frozenset[str]:
    """Return reads_later(), without what only the code after the loop reads.

    frame: its place is the begin of a loop's next round.
    """
    return _reads_later(frame.f_code, frame.f_lasti, stays=True)


def target_of(frame: FrameType) -> str | None:
    """Return the variable that the loop at the frame's place sets; None: there is no such loop."""
    steps = list(dis.get_instructions(frame.f_code))
    here = bisect.bisect([each.offset for each in steps], frame.f_lasti) - 1
    if steps[here].opname.lower() != "for_iter":
        return None
    return next((name for verb, name in _uses_of(steps[here + 1]) if verb == "STORE"), None)


@functools.cache
def _reads_later(code: CodeType, place: int, *, stays: bool = False) -> frozenset[str]:
    steps = list(dis.get_instructions(code))
    at = {each.offset: number for number, each in enumerate(steps)}
    after: list[list[int]] = []
    for number, each in enumerate(steps):
        goes_on = number + 1 < len(steps) and not _ENDS.match(each.opname)
        jumps = each.opcode in (*dis.hasjrel, *dis.hasjabs)
        after.append([number + 1] * goes_on + ([at[each.argval]] if jumps else []))
    for first, last, handler in _handlers_of(code):
        if not any(_OF_WITH.match(each.opname) for each in steps[at[handler] :][:3]):
            for offset in range(first, last, 2):
                if offset in at:
                    after[at[offset]].append(at[handler])
    seen, waiting = set[int](), [0]
    while waiting:
        number = waiting.pop()
        if number not in seen:
            seen.add(number)
            waiting += after[number]
    # The handler of a `with` block has no way in; it may read all.
    rest = {n for i, s in enumerate(steps) if i not in seen for v, n in _uses_of(s) if v == "LOAD"}
    live: list[set[str]] = [set() for _ in steps]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(steps))):
            found = set().union(*(live[each] for each in after[number]))
            for verb, name in reversed(list(_uses_of(steps[number]))):
                found = found | {name} if verb == "LOAD" else found - {name}
            changed = changed or found != live[number]
            live[number] = found
    # The place of a call may be inside of its instruction.
    here = bisect.bisect(list(at), place) - 1
    ways = after[here][:1] if stays and steps[here].opname.lower() == "for_iter" else after[here]
    return frozenset(rest.union(*(live[each] for each in ways), _names_inside(code)))


def _handlers_of(code: CodeType) -> list[tuple[int, int, int]]:
    """Return the first offset of guarded code, the offset after it, and that of its handler."""
    if sys.version_info >= (3, 11):
        entries = dis.Bytecode(code).exception_entries
        return [(each.start, each.end, each.target) for each in entries]
    return [
        (each.offset, each.argval, each.argval)
        for each in dis.get_instructions(code)
        if _OF_TRY.match(each.opname)
    ]


def _names_inside(code: CodeType) -> set[str]:
    """Return the names that functions inside of this code may read."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {n for each in inner for n in (*each.co_names, *each.co_freevars, *_names_inside(each))}


def _uses_of(step: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Yield the verbs (LOAD, STORE or DELETE) of an instruction, each with a variable."""
    verbs = _USES.findall(step.opname)
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    yield from zip(verbs, map(str, names), strict=False)
