"""Write the values of Python and NumPy as nodes of a skeleton.

No pickle, and no import that a file asks for. A class of the script (an Enum, a named tuple) is the
class of a live value, or one of that name that the process has loaded.
"""

from __future__ import annotations

import enum
import pathlib
import random
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from typing import Any

import msgspec
import numpy as np
import torch

from rekindle.errors import SessionError
from rekindle.training.torch.state.nodes import Decoder, Encoder, Node, Reader, Writer

_PATHS: Mapping[str, type[pathlib.PurePath]] = {
    each.__name__: each
    for each in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}
# The functions that a defaultdict may call and that a file may name.
_FACTORIES: Mapping[str, Any] = {
    each.__name__: each
    for each in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
} | {"deque": deque, "Counter": Counter, "OrderedDict": OrderedDict, "None": None}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_NUMPY_NUMBERS = "biufc"
REMEDY = (
    "keep it out of the state, convert it to a tensor, a number, a text or a container of these, "
    "or give its object state_dict() and load_state_dict() that do so"
)


def is_named_tuple(kind: type) -> bool:
    """Return whether values of this class are tuples with named fields, and nothing else."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def encode(value: Any, path: str, writer: Writer) -> Node | None:
    """Return the node of a value; None: a skeleton cannot hold a value of this kind."""
    kind = type(value)
    if kind in _ENCODERS:
        return _ENCODERS[kind](value, path, writer)
    if isinstance(value, enum.Enum):
        return _encode_enum(value, path, writer)
    if is_named_tuple(kind) and not getattr(value, "__dict__", None):
        items = [writer.encode(each, f"{path}.{i}") for i, each in enumerate(value)]
        return {"namedtuple": [writer.live.note(kind), list(kind._fields), items]}
    if kind.__name__ in _PATHS and isinstance(value, pathlib.PurePath):
        return {"path": [kind.__name__, str(value)]}
    if isinstance(value, np.generic):
        return _encode_number(value, path, writer)
    return None


def _encode_number(value: np.generic, path: str, writer: Writer) -> Node | None:
    plain = value.item()
    if value.dtype.kind in _NUMPY_NUMBERS and not isinstance(plain, np.generic):
        return {"numpy": [value.dtype.name, writer.encode(plain, path)]}
    array = encode(np.asarray(value), path, writer)
    return None if array is None else {"scalar": array}


def _encode_enum(value: enum.Enum, path: str, writer: Writer) -> Node:
    name = writer.live.note(type(value))
    if isinstance(value, enum.Flag):  # a combination of flags has no name of its own
        return {"flag": [name, writer.encode(value.value, path)]}
    return {"enum": [name, value.name]}


def _encode_array(array: np.ndarray[Any, Any], path: str, writer: Writer) -> Node | None:
    if array.dtype.hasobject or array.dtype.names is not None:
        return None
    by_column = array.flags.f_contiguous and not array.flags.c_contiguous
    rows = np.ascontiguousarray(array.T if by_column else array).reshape(-1).view(np.uint8)
    body = _encode_bytes(rows if rows.flags.writeable else rows.copy(), path, writer)
    order = "F" if by_column else "C"
    return {"ndarray": [array.dtype.str, list(array.shape), order, body]}


def _encode_bytes(row: np.ndarray[Any, Any], path: str, writer: Writer) -> Node:
    return writer.encode(torch.from_numpy(row), path)


def _encode_blob(value: bytes | bytearray, path: str, writer: Writer) -> Node:
    row = np.frombuffer(bytearray(value), np.uint8)
    return {type(value).__name__: _encode_bytes(row, path, writer)}


def _encode_set(value: Iterable[Any], path: str, writer: Writer) -> Node:
    before = len(writer.tensors)
    nodes = [writer.encode(each, f"{path}.{{{each!r}}}") for each in value]
    if len(writer.tensors) > before:
        raise SessionError(f"{path}: a set in a state cannot contain tensors or bytes; use a list")
    return {type(value).__name__: sorted(nodes, key=msgspec.json.encode)}


def _encode_deque(value: deque[Any], path: str, writer: Writer) -> Node:
    items = [writer.encode(each, f"{path}.{i}") for i, each in enumerate(value)]
    return {"deque": [value.maxlen, items]}


def _encode_defaultdict(value: defaultdict[Any, Any], path: str, writer: Writer) -> Node:
    factory = value.default_factory
    names = [name for name, each in _FACTORIES.items() if each is factory]
    if not names:
        writer.live.factories[path] = factory
    return {
        "defaultdict": [
            {"builtin": names[0]} if names else {"live": path},
            writer.pairs(value, path),
        ]
    }


def _encode_datetime(value: Any, path: str, writer: Writer) -> Node:
    zone = writer.encode(value.tzinfo, path)
    return {type(value).__name__: [value.replace(tzinfo=None).isoformat(), value.fold, zone]}


def _encode_timezone(value: Any, path: str, writer: Writer) -> Node:
    return {"timezone": [writer.encode(each, path) for each in value.__getinitargs__()]}


def _encode_zone(value: zoneinfo.ZoneInfo, path: str, writer: Writer) -> Node | None:
    return {"zone": value.key} if value.key else None


def _encode_generator(value: torch.Generator, path: str, writer: Writer) -> Node:
    return {"generator": [str(value.device), writer.encode(value.get_state(), path)]}


def _encode_numpy_generator(value: Any, path: str, writer: Writer) -> Node | None:
    legacy = isinstance(value, np.random.RandomState)
    state = value.get_state(legacy=False) if legacy else value.bit_generator.state
    name = state["bit_generator"] if isinstance(state, dict) else ""
    if name not in _BIT_GENERATORS:
        return None
    return {type(value).__name__: [name, writer.encode(state, path)]}


def _encode_python_generator(value: random.Random, path: str, writer: Writer) -> Node:
    version, words, gauss = value.getstate()
    row = np.asarray(words, np.uint32)
    return {"Random": [version, writer.encode(row, path), writer.encode(gauss, path)]}


_ENCODERS: Mapping[type, Encoder] = {
    complex: lambda v, p, w: {"complex": [w.encode(v.real, p), w.encode(v.imag, p)]},
    set: _encode_set,
    frozenset: _encode_set,
    bytes: _encode_blob,
    bytearray: _encode_blob,
    deque: _encode_deque,
    defaultdict: _encode_defaultdict,
    datetime: _encode_datetime,
    time: _encode_datetime,
    date: lambda v, _p, _w: {"date": v.isoformat()},
    timedelta: lambda v, _p, _w: {"timedelta": [v.days, v.seconds, v.microseconds]},
    timezone: _encode_timezone,
    zoneinfo.ZoneInfo: _encode_zone,
    np.ndarray: _encode_array,
    np.random.Generator: _encode_numpy_generator,
    np.random.RandomState: _encode_numpy_generator,
    random.Random: _encode_python_generator,
    torch.Generator: _encode_generator,
    torch.Size: lambda v, _p, _w: {"size": [int(each) for each in v]},
    torch.dtype: lambda v, _p, _w: {"dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v, _p, _w: {"device": str(v)},
}


def _decode_enum(body: Any, reader: Reader) -> Any:
    name, member = body
    if reader.live is None:
        return member
    return reader.live.find(name, _is_enum).__members__[member]


def _decode_flag(body: Any, reader: Reader) -> Any:
    value = reader.decode(body[1])
    if reader.live is None:
        return value
    return reader.live.find(body[0], lambda kind: issubclass(kind, enum.Flag))(value)


def _decode_named_tuple(body: Any, reader: Reader) -> Any:
    name, fields, items = body
    values = [reader.decode(each) for each in items]
    if reader.live is None:
        return tuple(values)
    kind = reader.live.find(name, is_named_tuple)
    if list(kind._fields) != fields:
        raise SessionError(
            f"the state has a {name} with the fields {', '.join(fields)}, but the script's class "
            f"has {', '.join(kind._fields)}"
        )
    return tuple.__new__(kind, values)


def _decode_default(body: Any, reader: Reader) -> Any:
    factory, pairs = body
    [(where, name)] = factory.items()
    entries = [(reader.decode(key), reader.decode(value)) for key, value in pairs]
    if where == "builtin":
        return defaultdict(_FACTORIES[name], entries)
    if reader.live is None:
        return dict(entries)
    if name not in reader.live.factories:
        raise SessionError(
            f"the state has a defaultdict at {name} with a function of the script, which a "
            "checkpoint cannot store; create it before the Session"
        )
    return defaultdict(reader.live.factories[name], entries)


def _decode_array(body: Any, reader: Reader) -> Any:
    dtype, shape, order, rows = body
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise ValueError("its elements are objects")
    flat = reader.decode(rows).cpu().numpy().copy().view(kind)
    return flat.reshape(shape[::-1]).T if order == "F" else flat.reshape(shape)


def _bytes_of(node: Node, reader: Reader) -> bytes:
    data: bytes = reader.decode(node).cpu().numpy().tobytes()
    return data


def _decode_moment(kind: Any) -> Callable[[Any, Reader], Any]:
    def decode(body: Any, reader: Reader) -> Any:
        text, fold, zone = body
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=reader.decode(zone))

    return decode


def _decode_generator(body: Any, reader: Reader) -> torch.Generator:
    generator = torch.Generator(body[0])
    generator.set_state(reader.decode(body[1]))
    return generator


def _bits(body: Any) -> Any:
    if body[0] not in _BIT_GENERATORS:
        raise ValueError(f"{body[0]} is no bit generator of NumPy")
    return getattr(np.random, body[0])()


def _decode_numpy_generator(body: Any, reader: Reader) -> np.random.Generator:
    bits = _bits(body)
    bits.state = reader.decode(body[1])
    return np.random.Generator(bits)


def _decode_random_state(body: Any, reader: Reader) -> np.random.RandomState:
    found = np.random.RandomState(_bits(body))
    found.set_state(reader.decode(body[1]))
    return found


def _decode_python_generator(body: Any, reader: Reader) -> random.Random:
    version, words, gauss = body
    found = random.Random()
    found.setstate((version, tuple(reader.decode(words).tolist()), reader.decode(gauss)))
    return found


DECODERS: Mapping[str, Decoder] = {
    "complex": lambda b, r: complex(*map(r.decode, b)),
    "set": lambda b, r: set(map(r.decode, b)),
    "frozenset": lambda b, r: frozenset(map(r.decode, b)),
    "bytes": _bytes_of,
    "bytearray": lambda b, r: bytearray(_bytes_of(b, r)),
    "deque": lambda b, r: deque(map(r.decode, b[1]), b[0]),
    "defaultdict": _decode_default,
    "datetime": _decode_moment(datetime),
    "time": _decode_moment(time),
    "date": lambda b, _: date.fromisoformat(b),
    "timedelta": lambda b, _: timedelta(*b),
    "timezone": lambda b, r: timezone(*map(r.decode, b)),
    "zone": lambda b, _: zoneinfo.ZoneInfo(b),
    "path": lambda b, _: _PATHS[b[0]](b[1]),
    "numpy": lambda b, r: np.dtype(b[0]).type(r.decode(b[1])),
    "ndarray": _decode_array,
    "scalar": lambda b, r: r.decode(b)[()],
    "enum": _decode_enum,
    "flag": _decode_flag,
    "namedtuple": _decode_named_tuple,
    "Generator": _decode_numpy_generator,
    "RandomState": _decode_random_state,
    "Random": _decode_python_generator,
    "generator": _decode_generator,
    "size": lambda b, _: torch.Size(b),
    "device": lambda b, _: torch.device(b),
}
