"""Keep the states that decide the order of an epoch: generators, and what its samplers count.

A new process sets them to those at the begin of an epoch, and gets the same order again.
"""

from __future__ import annotations

import copy
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from rekindle.errors import SessionError
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.state.capture import as_bytes
from rekindle.training.torch.state.skeleton import Writer

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_MOST = 2_000  # objects that a search visits
_LONG = 64  # elements; longer containers hold data, not objects
_SAMPLED = 2**20  # elements; of a longer array or list only a sample shows a change
_SAMPLE = 4_096
_LARGEST = 64 * 2**20  # bytes of a changed value that a state takes
_ATOMS = (bool, int, float, complex, str, bytes, range, types.FunctionType, type, types.ModuleType)
_DATA = (torch.Tensor, np.ndarray, *GENERATORS)
_PLAIN = (type(None), bool, int, float, str, list, tuple, dict, set, deque, np.ndarray, np.generic)
_NOT_SEARCHED = frozenset(("dataset", "data_source"))  # of a sampler
_KNOWN = ("torch", "torchdata", "builtins", "collections")


class EpochOrder:
    """The states of some objects of a script, and of the generators of the process.

    roots: the objects that decide the order, by name: samplers, an iterable data set, a loader. The
    search includes the objects in them, but not the data set of a sampler. Objects that they make
    in an epoch do not count, except generators.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        """Note the present values. Raises SessionError: an object holds an iterator."""
        self._roots = roots
        self._names = sorted({name for name, _ in _generators(roots, skip=_NOT_SEARCHED)})
        self._first: dict[str, dict[str, int]] = {}
        self._copies: dict[str, dict[str, Any]] = {}  # of the first values, if they are not large
        for name, thing in self._objects():
            self._first[name] = _marks(thing)
            self._copies[name] = {key: _copied(vars(thing)[key]) for key in self._first[name]}
            for key, value in _attributes(thing):
                if isinstance(value, Iterator):
                    raise SessionError(
                        f"{name}.{key} is an iterator, whose position a new process cannot know; "
                        "make it in __iter__(), at the begin of each epoch"
                    )

    def generators(self) -> dict[str, Any]:
        """Return the generators of the process, and those of the objects, by name."""
        found = dict(rng.GLOBAL)
        known = {id(each) for each in found.values()}
        for name, generator in _generators(self._roots, skip=_NOT_SEARCHED):
            is_old = name in self._names or name.rpartition(".")[0] in self._first
            if is_old and id(generator) not in known:
                known.add(id(generator))
                found[name] = generator
        return found

    def generator_states(self) -> dict[str, Any]:
        """Return the states of the generators, in values that the state format holds."""
        live = sorted(self.generators().items())
        return {"generators": {name: _packed_state(each) for name, each in live}}

    def states(self, *, changed: bool = True) -> dict[str, Any]:
        """Return the states of the generators, and copies of plain values of the objects.

        changed: only those that differ from the first ones. A sampler may shuffle its list in
        place, or count its epochs. Raises SessionError: a changed value is too large.
        """
        values = self._values(changed=changed)
        return {**self.generator_states(), "names": self._names, "values": values}

    def _values(self, *, changed: bool) -> dict[str, dict[str, Any]]:
        """Return the values by name and attribute."""
        found: dict[str, dict[str, Any]] = {}
        for name, key, live in self._plain():
            if changed and self._is_first(name, key, live):
                continue
            value = _copied(live)
            if value is not None:
                found.setdefault(name, {})[key] = value
            elif changed:
                raise SessionError(
                    f"{name}.{key} changes from epoch to epoch, and is too large for a state; keep "
                    "it unchanged, and shuffle a list of its indices with a generator"
                )
        return found

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the result of states(); all other values become the first ones.

        That of generator_states() sets only the generators.
        Raises SessionError: the states belong to other objects.
        """
        names = states.get("names", self._names)
        if names != self._names:
            raise SessionError(
                f"the state has a loader with the generators {', '.join(names) or 'of torch'}, but "
                f"that of the script has {', '.join(self._names) or 'no other ones'}; make the "
                "loader in the same way in each run"
            )
        generators, values = states["generators"], states.get("values", {})
        live = self.generators()
        things = dict(self._objects())
        for name in sorted(generators.keys() - live.keys()):  # __iter__() makes it in an epoch
            owner, _, key = name.rpartition(".")
            if owner in things:
                vars(things[owner])[key] = live[name] = _made(generators[name])
        missing = sorted((generators.keys() - live.keys()) | (values.keys() - things.keys()))
        if missing:
            raise SessionError(
                f"the position in the epoch has a state of {', '.join(missing)}, which this "
                "script's loader does not have; make the loader in the same way in each run"
            )
        for name, state in generators.items():
            rng.set_state(live[name], _unpacked_state(live[name], state))
        for name, key, value in list(self._plain()) if "values" in states else []:
            if key not in values.get(name, ()) and not self._is_first(name, key, value):
                first = self._copies.get(name, {}).get(key)
                if first is not None:
                    vars(things[name])[key] = _filled(value, _unpacked(first))
        for name, mine in values.items():
            inside = vars(things[name])
            for key, value in mine.items():
                inside[key] = _filled(inside.get(key), _unpacked(value))

    def _plain(self) -> Iterator[tuple[str, str, Any]]:
        for name, thing in self._objects():
            for key, value in _attributes(thing) if name in self._first else ():
                if key not in _NOT_SEARCHED and isinstance(value, (*_PLAIN, torch.Tensor)):
                    yield name, key, value

    def _is_first(self, name: str, key: str, value: Any) -> bool:
        return self._first.get(name, {}).get(key) == mark(value)

    def is_of_torch(self) -> bool:
        """Return whether torch has all classes of the objects."""
        return all(
            type(thing).__module__.partition(".")[0] in _KNOWN for _, thing in self._objects()
        )

    def _objects(self) -> Iterator[tuple[str, Any]]:
        for name, thing in _search(self._roots, skip=_NOT_SEARCHED):
            if not isinstance(thing, _DATA) and hasattr(thing, "__dict__"):
                yield name, thing


class Watch:
    """Finds random numbers that the order and the script draw from the same generator in turns."""

    def __init__(self, generators: Mapping[str, Any]) -> None:
        self._generators = generators
        self._states: dict[str, Any] | None = None
        self._shared: set[str] = set()  # the script has drawn from them in this epoch

    def draw(self, function: Callable[[], Any]) -> Any:
        """Return the function's result, which decides the order.

        Raises SessionError: it and the script have drawn from the same generator in this epoch.
        """
        before = self._now()
        if self._states is not None:
            self._shared |= _moved(self._states, before)
        result = function()
        self._states = self._now()
        shared = sorted(self._shared & _moved(before, self._states))
        if shared:
            raise SessionError(
                f"between two batches the script draws from the generator {', '.join(shared)}, and "
                "the loader draws its order from it, too; a new process could not find the same "
                "order. Give the sampler or the data set a generator of its own, or draw inside "
                "the step"
            )
        return result

    def leave(self) -> None:
        """Set the generators to the states after the last draw."""
        for name, state in (self._states or {}).items():
            rng.set_state(self._generators[name], state)

    def _now(self) -> dict[str, Any]:
        return {name: rng.state_of(each) for name, each in self._generators.items()}


def digest(states: Any) -> int:
    """Return 64 bits that are equal for equal values of the state format."""
    writer = Writer()
    node = writer.encode(states, "")
    found = xxhash.xxh3_64(msgspec.json.encode(node))
    for tensor in writer.tensors.values():
        found.update(as_bytes(tensor).cpu().numpy().data)
    return found.intdigest()


def mark(value: Any) -> int | None:
    """Return 64 bits of a plain value, which change with it; None: it is another object."""
    if not isinstance(value, (*_PLAIN, torch.Tensor)):
        return None
    if isinstance(value, list) and len(value) > _SAMPLE and type(value[0]) not in (int, list):
        value = [len(value), *value[:: len(value) // _SAMPLE]]
    try:
        return xxhash.xxh3_64_intdigest(_encoder.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def generators_of(thing: Any) -> list[Any]:
    """Return the generators in an object, in the same order in each process."""
    found = {id(each): each for _, each in _generators({"": thing}, skip=frozenset())}
    return [each for each in found.values() if all(each is not g for g in rng.GLOBAL.values())]


def _moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    return {name for name, state in now.items() if not rng.is_same(before[name], state)}


def _generators(roots: Mapping[str, Any], skip: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name, thing in _search(roots, skip):
        if isinstance(thing, GENERATORS) and not isinstance(thing, random.SystemRandom):
            yield name, thing


def _search(roots: Mapping[str, Any], skip: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the objects in the roots, breadth first, each with its path."""
    queue = deque(roots.items())
    seen: set[int] = set()
    while queue and len(seen) < _MOST:
        name, thing = queue.popleft()
        if thing is None or isinstance(thing, _ATOMS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield name, thing
        if isinstance(thing, _DATA):
            continue
        for key, value in _attributes(thing):
            if key not in skip and not (skip and isinstance(value, Dataset)):
                queue.append((f"{name}.{key}", value))
        if isinstance(thing, list | tuple | deque) and len(thing) <= _LONG:
            queue.extend((f"{name}[{i}]", each) for i, each in enumerate(thing))
        elif isinstance(thing, dict) and len(thing) <= _LONG:
            queue.extend((f"{name}[{key!r}]", each) for key, each in thing.items())


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    inside = getattr(thing, "__dict__", None)
    return list(inside.items()) if isinstance(inside, dict) else []


def _marks(thing: Any) -> dict[str, int]:
    found = {key: mark(value) for key, value in _attributes(thing) if key not in _NOT_SEARCHED}
    return {key: value for key, value in found.items() if value is not None}


def _as_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        flat = value.reshape(-1)
        step = max(1, flat.size // _SAMPLE) if flat.size > _SAMPLED else 1
        return [value.dtype.str, list(value.shape), flat[::step].tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, deque):
        return list(value)
    raise TypeError


def _packed_state(generator: Any) -> Any:
    """Return the state of a generator in values of the state format."""
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, np.asarray(words, np.uint32), gauss]
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return rng.state_of(generator)


def _made(state: Any) -> Any:
    """Return a new generator for this packed state; the caller sets it."""
    if isinstance(state, torch.Tensor):
        return torch.Generator()
    if isinstance(state, list):
        return random.Random()
    bits = getattr(np.random, state["bit_generator"])()
    return np.random.RandomState(bits) if "has_gauss" in state else np.random.Generator(bits)


def _unpacked_state(generator: Any, state: Any) -> Any:
    if isinstance(generator, random.Random):
        version, words, gauss = state
        return version, tuple(words.tolist()), gauss
    return state


def _copied(value: Any) -> Any:
    """Return a copy of a plain value in a form with few nodes; None: it is too large or not plain.

    Long lists of numbers, and lists of such lists, become arrays.
    """
    if isinstance(value, np.ndarray | torch.Tensor):
        return {"plain": copy.deepcopy(value)} if value.nbytes <= _LARGEST else None
    try:
        if len(value) * 8 > _LARGEST or len(_encoder.encode(value)) > _LARGEST:
            return None
    except (ValueError, OverflowError, RecursionError):
        return None
    except TypeError:
        if not isinstance(value, (bool, int, float, str, np.generic, type(None))):
            return None
    if isinstance(value, list) and len(value) > _LONG:
        kinds = set(map(type, value))
        if kinds == {int}:
            return {"numbers": np.asarray(value)}
        if kinds == {list}:
            flat = list(itertools.chain.from_iterable(value))
            if set(map(type, flat)) == {int}:
                return {"lists": [np.asarray(flat), np.asarray(list(map(len, value)))]}
    return {"plain": copy.deepcopy(value)}


def _unpacked(value: Any) -> Any:
    [(form, body)] = value.items()
    if form == "numbers":
        return body.tolist()
    if form == "lists":
        flat, ends = body[0].tolist(), np.cumsum(body[1]).tolist()
        return [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return copy.deepcopy(body)


def _filled(live: Any, value: Any) -> Any:
    """Return the live list or array with this content, because the script may hold it."""
    if type(live) is list and type(value) is list:
        live[:] = value
        return live
    if isinstance(live, np.ndarray) and isinstance(value, np.ndarray):
        if (live.shape, live.dtype) == (value.shape, value.dtype) and live.flags.writeable:
            live[...] = value
            return live
    return value


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_plain)  # of plain values
