"""Notice that the value of a script's variable has changed, by a value that changes with it."""

from __future__ import annotations

import array
import functools
import warnings
from collections import deque
from collections.abc import Iterable, Set
from types import (
    BuiltinMethodType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from rekindle.training.torch import private
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.epoch_order import GENERATORS
from rekindle.training.torch.state.script_names import (
    ATOMS,
    LONG,
    SMALL_BYTES,
    Names,
    is_named,
    is_of_script,
    kind_of,
)

_SAMPLE = 1 << 20  # elements of an array that are compared, at most twice as many
_PLAIN = (list, tuple, dict, set, frozenset)


@functools.cache
def is_iterator(kind: Any) -> bool:
    """Return whether a class is one of iterators whose position shows."""
    names = ("BaseDataLoaderIter", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
    loader = kind.__module__.partition(".")[0] in ("torch", "torchdata") and kind.__name__ in names
    plain = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return loader or plain


def position_of(iterator: Any) -> Any:
    """Return a value that changes when the script advances this iterator."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None or iterator.gi_running:  # one around session.batches() runs now
            return None
        inside = iterator.gi_yieldfrom
        deeper = position_of(inside) if is_iterator(kind_of(inside)) else None
        return frame.f_lasti, [id(each) for each in frame.f_locals.values()], deeper
    given = private.batches_given(iterator)
    if given is not None:
        return given
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools
            _, parts, *more = iterator.__reduce__()
    except (TypeError, AttributeError):
        return None
    inner = (*parts, *more)
    return [position_of(e) if is_iterator(kind_of(e)) else _number_or_id(e) for e in inner]


def _number_or_id(value: Any) -> Any:
    return value if type(value) in ATOMS else id(value)


class Prints:
    """Gives values that change with the contents of variables.

    left: the ids of torch modules whose attributes do not count.
    """

    def __init__(self, left: Set[int] = frozenset()) -> None:
        self._left = left

    def of(self, value: Any, *, whole: bool) -> Any:
        """Return a value that changes with the contents of a variable.

        whole: also with the elements of a long container; otherwise only with its length.
        """
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return print_of_tensor(value)
        if kind is FunctionType and not is_named(value):
            return id(value)
        if isinstance(value, type) and not is_of_script(value):
            return id(value)
        try:
            plain = self._opened(value, set(), whole=whole)
            return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(plain, enc_hook=_print_inside))
        except RecursionError:
            return "too deep", object()  # a change would not show, so it counts as one
        except (ValueError, OverflowError):  # an integer of more than 64 bits, a lone surrogate
            return self._apart(value, whole=whole)
        except TypeError:
            return "other", id(value)

    def _opened(self, value: Any, seen: set[int], *, whole: bool) -> Any:
        """Return a value in which each object of the script is its names and values.

        The encoder has a form of its own for some of these objects, which leaves out attributes.
        """
        kind = type(value)
        if kind in ATOMS:
            return value
        if not whole:
            value = _short(value)
        is_container = isinstance(value, list | tuple | deque | dict | set | frozenset)
        if is_container and _is_plain(value):
            return value
        has_names = self._has_names(value)
        if is_container or has_names:
            if id(value) in seen:
                return id(value)
            seen.add(id(value))
        names = Names(value).read() if has_names else {}
        found: list[Any] = [kind.__qualname__]
        found += [self._opened(each, seen, whole=whole) for each in parts_of(value)]
        found += [(n, self._opened(each, seen, whole=whole)) for n, each in names.items()]
        if isinstance(value, dict):
            found += [(k, self._opened(v, seen, whole=whole)) for k, v in dict.items(value)]
        elif is_container:
            found += [self._opened(each, seen, whole=whole) for each in value]
        return found if is_container or len(found) > 1 else value

    def _has_names(self, value: Any) -> bool:
        if isinstance(value, torch.nn.Module):
            return id(value) not in self._left and is_of_script(kind_of(value))
        return is_named(value)

    def _apart(self, value: Any, *, whole: bool) -> Any:
        """Return the prints of the elements, because one of them has no binary form."""
        if type(value) in ATOMS:
            return value
        if isinstance(value, dict):
            pairs = dict.items(value)
            return [(k if type(k) in ATOMS else id(k), self.of(v, whole=whole)) for k, v in pairs]
        if isinstance(value, list | tuple | deque | set | frozenset):
            return [self.of(each, whole=whole) for each in value]
        names = Names(value).read() if self._has_names(value) else {}
        return id(value), [(name, self.of(each, whole=whole)) for name, each in names.items()]


def parts_of(value: Any) -> Iterable[Any]:
    """Return what a method, a function with arguments, or a container of a library refers to."""
    if isinstance(value, MethodType | BuiltinMethodType):
        owner = value.__self__
        return () if isinstance(owner, ModuleType | type) else (owner,)
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, array.array):
        return (value.tobytes(),)
    if is_wrapper(kind_of(value)):
        inner: Iterable[Any] = vars(value).values()
        return inner
    return ()


@functools.cache
def is_wrapper(kind: Any) -> bool:
    """Return whether a class of `collections` or `weakref` wraps a container."""
    return kind.__module__ in ("collections", "weakref") and kind.__dictoffset__ != 0


def _is_plain(value: Any) -> bool:
    elements = dict.values(value) if isinstance(value, dict) else value
    return type(value) in _PLAIN and ATOMS.issuperset(map(type, elements))


def _short(value: Any) -> Any:
    """Return the value, or the length of a long container."""
    long = isinstance(value, list | tuple | deque | dict | set) and len(value) > LONG
    return ("long", id(value), len(value)) if long else value


def _print_inside(value: Any) -> Any:
    """Return the print of a value that has no names."""
    if isinstance(value, torch.Tensor):
        return print_of_tensor(value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, digest_of(value)
    if isinstance(value, np.generic | complex | range):
        return repr(value)
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, GENERATORS) and all(value is not each for each in rng.GLOBAL.values()):
        state = rng.state_of(value)
        return repr(state.tolist() if isinstance(state, torch.Tensor) else state)
    if is_iterator(kind_of(value)):
        return id(value), repr(position_of(value))
    return id(value)


def print_of_tensor(tensor: torch.Tensor) -> Any:
    """Return a value that changes with a tensor; not with the values of a parameter.

    Some changes count no version, such as those through `.data` and `.numpy()`.
    """
    if tensor.is_inference() or (tensor.requires_grad and tensor.is_leaf):
        return id(tensor)
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    plain = type(tensor) is torch.Tensor and strided
    if plain and tensor.device.type == "cpu" and tensor.nbytes <= SMALL_BYTES:
        row = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return id(tensor), xxhash.xxh3_64_intdigest(row.numpy().tobytes())
    return id(tensor), private.version_of(tensor)


def digest_of(array: np.ndarray[Any, Any]) -> int:
    """Return a digest of a sample of the elements."""
    if array.dtype.hasobject:
        return hash(tuple(map(id, array.reshape(-1).tolist())))
    every = max(1, array.size // _SAMPLE)
    return xxhash.xxh3_64_intdigest(array.reshape(-1)[::every].tobytes())
