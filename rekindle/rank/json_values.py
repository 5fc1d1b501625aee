"""Converts small values to JSON and back, without a framework.

It does not use pickle, because a state may come from a store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rekindle.errors import SessionError

_KINDS = "biufc"  # NumPy's types that convert without loss


def plain(value: Any, where: str) -> Any:
    """Return the value for JSON; a type that JSON lacks becomes an object with one entry, its kind.

    NumPy's numbers keep their type, because a comparison in another type may round differently. A
    tuple becomes a list. where: the name of the value in errors.
    Raises SessionError: the type is not supported.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in _KINDS:
            raise SessionError(
                f"{where} is an array of {value.dtype}, which a checkpoint cannot store"
            )
        array = np.asarray(value)
        return {"array": [array.dtype.str, list(array.shape), array.tobytes().hex()]}
    if isinstance(value, list | tuple):
        return [plain(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: plain(each, f"{where}.{key}") for key, each in value.items()}}
    raise SessionError(
        f"{where} has type {type(value).__name__}, but state_dict() may return only None, "
        "numbers, text, NumPy arrays, and lists and dictionaries (with text as keys) of these"
    )


def real(value: Any) -> Any:
    """Return the value from which `plain` made this one."""
    if isinstance(value, list):
        return [real(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "float":
        return float(held)
    if kind == "array":
        dtype, shape, data = held
        return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()[()]
    return {key: real(each) for key, each in held.items()}
