"""Find objects of the script whose state changes in training, and that its Session does not keep.

A replaced rank would begin with their first state. The search starts at the variables of the
script: the frames that lead to the step, and the modules of the script. It compares the states
after the first steps of a job; an object that does not change, such as a teacher, is not found.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import rekindle
from rekindle.errors import SessionError
from rekindle.rank import sources
from rekindle.rank.error_origin import is_of_library
from rekindle.training.torch import private
from rekindle.training.torch.state.skeleton import Writer

LAST = 4  # finished steps of a job after which nothing is compared any more; GANs alternate
_MOST = 20_000  # objects that a search visits
_LONG = 1_000  # elements; longer containers hold data
_SAMPLE = 4_096  # elements of each tensor that are compared, at most twice as many
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, type, types.ModuleType)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OURS = str(Path(rekindle.__file__).parent)  # the fork server runs as the main module
_OF_LIBRARY = ("torch", "numpy", "rekindle", "torchdata")


class Forgotten:
    """The search in one rank.

    kept: the objects that the Session keeps, by name.
    given: the arguments of the script for them, and other objects that the Session knows.
    ignore: objects that may be lost, or their names in the message.
    """

    def __init__(
        self, kept: Mapping[str, Any], given: Iterable[Any], ignore: Iterable[Any]
    ) -> None:
        ignored = list(ignore)
        self._names = {each for each in ignored if isinstance(each, str)}
        self._kept = kept
        self._known = [each for each in (*given, *ignored) if each is not None]
        self._before: dict[int, tuple[Any, Any]] = {}  # by id: the object and its state
        self._looks = 0

    @property
    def done(self) -> bool:
        """Return whether no more steps are compared."""
        return self._looks >= LAST

    def look(self, step: int) -> None:
        """Compare the objects with the last call, at the end of this step.

        Raises SessionError: the state of an object has changed; the text names each of them.
        """
        self._looks += 1
        ids, memory = self._covered()
        found: dict[int, tuple[Any, Any]] = {}
        changed: list[tuple[str, Any]] = []
        for name, thing, inner in self._objects(ids):
            state = _state_of(thing, memory, tensors_only=inner)
            found[id(thing)] = thing, state
            before = self._before.get(id(thing))
            if before is not None and before[0] is thing and _differs(before[1], state):
                changed.append((name, thing))
        self._before = {} if self.done else found
        changed = [each for each in changed if each[0] not in self._names]
        if changed:
            raise SessionError(_told(changed, step))
        loose = self._loose() if self._looks > 1 else None
        if loose is not None:
            raise SessionError(
                f"an optimizer changes {loose}, which is no parameter of a module that the Session "
                "keeps, so a rank that is replaced would begin again with its first values: give "
                f"the Session extra={{{loose.split(' ')[0]!r}: ...}}"
            )

    def _objects(self, ids: Set[int]) -> Iterator[tuple[str, Any, bool]]:
        """Yield each object to compare, with its name; True: only its tensors count."""
        for name, thing in _reachable(_variables(), ids):
            yield name, thing, False
        given = {id(each) for each in self._known}
        for name, thing in self._kept.items():
            if isinstance(thing, torch.optim.Optimizer):  # SAM keeps another one, and not its state
                for key, inner in vars(thing).items():
                    if isinstance(inner, torch.optim.Optimizer) and id(inner) not in given:
                        yield f"{name}.{key}", inner, True

    def _loose(self) -> str | None:
        """Return the name and shape of a tensor that only an optimizer has; None: there is none."""
        modules = (
            each for each in (*self._kept.values(), *self._known) if isinstance(each, nn.Module)
        )
        held = {id(tensor) for each in modules for tensor in _tensors_of(each)}
        held |= {id(each) for each in self._known}
        writer = Writer()
        for name, thing in self._kept.items():
            if not isinstance(thing, nn.Module | torch.optim.Optimizer):
                writer.encode(thing.state_dict(), name)
        memory = {_memory(each) for each in writer.tensors.values()}
        optimizers = [e for e in self._kept.values() if isinstance(e, torch.optim.Optimizer)]
        for group in (group for each in optimizers for group in each.param_groups):
            for tensor in group["params"]:
                if id(tensor) not in held and _memory(tensor) not in memory:
                    names = [name for name, value in _variables() if value is tensor]
                    name = [*names, "a tensor"][0]
                    if name not in self._names:
                        return f"{name} (of shape {list(tensor.shape)})"
        return None

    def _covered(self) -> tuple[set[int], set[int]]:
        """Return the ids of the objects that are kept or ignored, and of the tensors in them."""
        roots = [("", each) for each in (*self._kept.values(), *self._known)]
        ids = {id(each) for _, each in roots}
        ids |= {id(inner) for _, inner in _reachable(roots, set(), inside=True)}
        writer = Writer()
        for name, thing in self._kept.items():
            if isinstance(thing, nn.Module | torch.optim.Optimizer):
                writer.encode(thing.state_dict(), name)
        memory = {_memory(each) for each in writer.tensors.values()}
        modules = (each for _, each in roots if isinstance(each, nn.Module))
        memory |= {_memory(tensor) for each in modules for tensor in _tensors_of(each)}
        return ids, memory


def _told(changed: list[tuple[str, Any]], step: int) -> str:
    lines = []
    for name, thing in changed:
        short = name.rpartition(".")[2].partition("[")[0]
        if isinstance(thing, LRScheduler):
            how = f"scheduler={name}, or extra={{{short!r}: {name}}}"
        else:
            how = f"extra={{{short!r}: {name}}}"
        lines.append(f"{name} (a {type(thing).__name__}): give the Session {how}")
    return (
        f"step {step} changed objects that the Session does not keep, so a rank that is "
        "replaced would begin again with their first state. "
        + "; ".join(lines)
        + ". What may be lost, give as ignore=[...]"
    )


# ---- the variables of the script


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the script's functions that run now, and of the script's modules."""
    frame: types.FrameType | None = sys._getframe(1)
    spaces: list[tuple[str, dict[str, Any]]] = []
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
        if not is_of_library(name, file) and not file.startswith(_OURS):
            spaces.append(("", dict(frame.f_locals)))
        frame = frame.f_back
    main = "__main__"  # also if the Session is in a thread, whose frames do not lead to it
    spaces.append(("", vars(sys.modules[main])))
    modules = sources.own_modules()
    spaces += [(f"{name}.", space) for name, _, space in modules if name != main]
    for prefix, space in spaces:
        for name, value in list(space.items()):
            if not name.startswith("__"):
                yield f"{prefix}{name}", value


def _reachable(
    roots: Iterable[tuple[str, Any]], known: Set[int], *, inside: bool = False
) -> list[tuple[str, Any]]:
    """Return each object with a state below the roots, with the shortest name of it.

    known: the ids of objects that the search leaves out, with all objects below them.
    inside: the roots are such objects. The search then leaves out an optimizer in another optimizer
    or in a scheduler, because these need not keep its state.
    """
    seen, found = set(known), []
    left_out = _seeded()
    waiting = deque(roots)
    for _ in range(_MOST):
        if not waiting:
            break
        name, thing = waiting.popleft()
        kind = type(thing)
        if issubclass(kind, (*_ATOMS, torch.Tensor)) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if issubclass(kind, DataLoader):  # a new process draws the order of an epoch again
            left_out |= {id(each) for each in _generators_of(thing)}
        elif _has_state(thing):
            found.append((name, thing))
        narrow = inside and issubclass(kind, LRScheduler | torch.optim.Optimizer)
        waiting.extend(
            (place, each)
            for place, each in _children(name, thing)
            if not narrow or issubclass(type(each), LRScheduler | list)
        )
    return [(name, thing) for name, thing in found if id(thing) not in left_out]


def _seeded() -> set[int]:
    """Return the ids of the generators that the Session seeds in each step."""
    generators: list[Any] = [torch.default_generator, np.random.mtrand._rand, random._inst]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return {id(each) for each in generators}


def _generators_of(loader: Any) -> Iterator[Any]:
    batches = getattr(loader, "batch_sampler", None)
    for each in (loader, loader.sampler, batches, getattr(batches, "sampler", None)):
        yield getattr(each, "generator", None)


def _has_state(thing: Any) -> bool:
    kind = type(thing)
    if issubclass(kind, nn.Module):
        return private.is_initialised(thing)
    if issubclass(kind, (torch.optim.Optimizer, LRScheduler, *_GENERATORS)):
        return True
    methods = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    return methods and kind.__module__.partition(".")[0] not in ("rekindle", "torchdata")


def _children(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects in a container, in the attributes of an object, or in a function."""
    kind = type(thing)
    if issubclass(kind, dict | list | tuple | set | frozenset | deque):
        if len(thing) <= _LONG:
            entries = thing.items() if issubclass(kind, dict) else enumerate(thing)
            yield from ((f"{name}[{key!r}]", each) for key, each in list(entries))
    elif issubclass(kind, types.FunctionType):
        for variable, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty cell has no contents
                yield variable, cell.cell_contents
    elif issubclass(kind, types.MethodType):
        yield name, thing.__self__
    elif issubclass(kind, DataLoader):
        yield f"{name}.dataset", thing.dataset
    else:
        yield from ((f"{name}.{key}", each) for key, each in _attributes(thing))


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object that may have objects of the script."""
    kind = type(thing)
    space = getattr(thing, "__dict__", None)
    if not isinstance(space, dict):
        return []
    if issubclass(kind, nn.Module):  # its parts have no names of their own
        return [(key, each) for key, each in space.items() if not key.startswith("_")]
    library = kind.__module__.partition(".")[0] in _OF_LIBRARY
    return [] if library and not _has_state(thing) else list(space.items())


# ---- states


def _state_of(thing: Any, memory: Set[int], *, tensors_only: bool) -> Any:
    """Return a value that differs if the state differs. memory: tensors that are kept elsewhere."""
    if isinstance(thing, nn.Module):
        metric = getattr(thing, "metric_state", None)  # torchmetrics keeps it out of state_dict()
        more = [_encoded(metric)] if isinstance(metric, dict) else []
        return digest_of_some(
            each for each in _tensors_of(thing) if _memory(each) not in memory
        ), more
    if isinstance(thing, torch.optim.Optimizer):
        values = [each for entry in thing.state.values() for each in _values(entry)]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        digest = digest_of_some(each for each in tensors if _memory(each) not in memory)
        groups = [{k: v for k, v in each.items() if k != "params"} for each in thing.param_groups]
        numbers = [each for each in values if isinstance(each, int | float)]
        return digest if tensors_only else (digest, repr((numbers, groups)))
    if isinstance(thing, torch.Generator):
        return thing.initial_seed(), thing.get_state().numpy().tobytes()
    if isinstance(thing, _GENERATORS):
        return _encoded(thing)
    try:
        state = thing.state_dict()
    except Exception:  # the script may never call it, and its errors are then not the script's
        return None
    return _encoded(state)


def _values(entry: Any) -> Iterable[Any]:
    return entry.values() if isinstance(entry, Mapping) else ()


def _differs(before: Any, now: Any) -> bool:
    """Return whether a state changed; a generator that the script seeds in each step did not."""
    if isinstance(now, tuple) and isinstance(now[1], bytes):
        return bool(before[0] == now[0] and before != now)
    return bool(before != now)


def _encoded(value: Any) -> bytes | None:
    """Return a value's digest; None: a state cannot hold it, so it is not compared."""
    writer = Writer()
    try:
        node = msgspec.json.encode(writer.encode(value, "state"))
    except (SessionError, UnicodeEncodeError, RecursionError):
        return None
    return node + digest_of_some(writer.tensors.values())


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _memory(tensor: torch.Tensor) -> int:
    """Return a number that tensors in one memory share."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    try:
        return local.data_ptr() or id(tensor)
    except RuntimeError:  # a sparse tensor, or one that consists of others
        return id(tensor)


def digest_of_some(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of a sample of each tensor's elements."""
    found = xxhash.xxh3_128()
    with torch.no_grad():
        for tensor in tensors:
            found.update(repr((tensor.dtype, tensor.shape)).encode())
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if type(local).__name__ in ("Tensor", "Parameter", "Buffer") and not local.is_meta:
                if local.layout is torch.strided and not local.is_quantized and local.numel():
                    found.update(_sample(local.detach()))
    return found.digest()


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a small tensor, or of elements that are spread over it."""
    if tensor.numel() > 2 * _SAMPLE:
        every = tensor.numel() // _SAMPLE
        spread = [slice(None, None, max(1, min(size, every))) for size in tensor.shape[:1]]
        tensor = tensor.view(-1)[::every] if tensor.is_contiguous() else tensor[tuple(spread)]
    return tensor.contiguous().view(-1)[: 2 * _SAMPLE].view(torch.uint8).cpu().numpy().tobytes()
