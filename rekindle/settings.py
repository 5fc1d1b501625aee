"""Declare settings that a person may change, each once, in a struct.

A field is `Annotated[type, Meta(description=..., ge=..., ...)]`. The declaration determines which
values a decoder refuses, and which values a struct refuses in Python code. Prefect's forms
(`rekindle.blocks.forms`) and the documentation's reference tables also follow from it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

CHOICES = "choices"  # in Meta.extra: the valid values of a text, or of a list's items

_BOUNDS: tuple[tuple[str, Callable[[float, float], bool], str], ...] = (
    ("ge", operator.ge, "at least"),
    ("gt", operator.gt, "above"),
    ("le", operator.le, "at most"),
)


def declared(hint: Any) -> Meta | None:
    """Return the declaration in a type hint; None: the hint has no declaration."""
    if get_origin(hint) is not Annotated:
        return None
    return next((each for each in get_args(hint)[1:] if isinstance(each, Meta)), None)


@functools.cache
def _limits(settings: type[msgspec.Struct]) -> dict[str, list[Meta]]:
    """Return the declarations of each field, including declarations inside a union."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: list(metas(hint)) for name, hint in hints.items()}


def metas(hint: Any) -> Iterator[Meta]:
    """Yield the declarations in a type hint, the outer ones first."""
    meta = declared(hint)
    if meta is not None:
        yield meta
        hint = get_args(hint)[0]
    for each in get_args(hint):
        yield from metas(each)


@functools.cache
def choices_of(settings: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Return the valid values of each field that declares some."""
    return {
        name: meta.extra[CHOICES]
        for name, found in _limits(settings).items()
        for meta in found
        if meta.extra and CHOICES in meta.extra
    }


def check_limits(settings: msgspec.Struct, what: str) -> None:
    """Check all numbers. what: a short name of the settings, for messages.

    Raises ValueError: a number is outside its limits.
    """
    for name, found in _limits(type(settings)).items():
        value = getattr(settings, name)
        limited = any(getattr(meta, bound) is not None for meta in found for bound, *_ in _BOUNDS)
        if not limited or value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"{what}: {name} is {value!r}; give a number")
        if not math.isfinite(value):
            raise ValueError(f"{what}: {name} is {value}; give a finite number")
        for meta in found:
            for bound, holds, words in _BOUNDS:
                limit = getattr(meta, bound)
                if limit is not None and not holds(value, limit):
                    raise ValueError(f"{what}: {name} is {value}; give {words} {limit}")
