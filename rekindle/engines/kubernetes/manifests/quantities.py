"""Check names, keys and amounts as Kubernetes does; each error describes a valid value. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from decimal import Decimal

from rekindle.errors import UsageError

_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_QUANTITY = re.compile(r"(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[munkMGTPE]|[eE][+-]?\d+)?")
_UNITS = {
    **{unit: Decimal(1024) ** (place + 1) for place, unit in enumerate(_BINARY)},
    **{unit: Decimal(1000) ** (place - 3) for place, unit in enumerate(_DECIMAL)},
}
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
CIDR = re.compile(r"[0-9a-fA-F.:]+/\d{1,3}")


def quantity(where: str, text: str) -> None:
    """Check an amount of a resource; an empty text is valid. Raises UsageError: it is invalid."""
    number = _QUANTITY.fullmatch(text)
    if text and not (number and float(number[1]) > 0):
        raise UsageError(f"{where} is {text!r}; give a quantity, for example 4, 500m or 64Gi")


def amount(text: object) -> Decimal:
    """Return an amount of a resource as a number. Raises UsageError: it is invalid."""
    found = _QUANTITY.fullmatch(str(text))
    if not found:
        raise UsageError(
            f"{text!r} is not an amount of a resource; give for example 4, 500m or 64Gi"
        )
    number, unit = Decimal(found[1]), found[3] or ""
    return number * _UNITS[unit] if unit in _UNITS else number.scaleb(int(unit[1:]))


def label(where: str, text: str) -> None:
    """Check a DNS label. Raises UsageError: it is invalid."""
    if not LABEL.fullmatch(text):
        raise UsageError(
            f"{where} is {text!r}; use at most 63 of a-z 0-9 -, a letter or digit at both ends"
        )


def subdomain(where: str, text: str) -> None:
    """Check the name of an object. Raises UsageError: it is invalid."""
    if not _SUBDOMAIN.fullmatch(text):
        raise UsageError(
            f"{where} is {text!r}; use at most 253 of a-z 0-9 - . , a letter or digit at both ends"
        )


def key(where: str, text: str) -> None:
    """Check the key of a label or annotation. Raises UsageError: it is invalid."""
    prefix, slash, name = text.rpartition("/")
    if (slash and not _SUBDOMAIN.fullmatch(prefix)) or not _KEY_NAME.fullmatch(name):
        raise UsageError(
            f"{where}: {text!r} is not a valid key; give at most 63 of A-Z a-z 0-9 - _ . , "
            "optionally after a domain and /"
        )


def value(where: str, text: str) -> None:
    """Check the value of a label. Raises UsageError: it is invalid."""
    if not _VALUE.fullmatch(text):
        raise UsageError(f"{where} is {text!r}; give at most 63 of A-Z a-z 0-9 - _ .")


def device(name: str) -> None:
    """Check the name of an extended resource. Raises UsageError: it is invalid."""
    key("device", name)
    if "/" not in name:
        raise UsageError(
            f"device is {name!r}; give a resource with its domain, for example nvidia.com/gpu"
        )


def no_choice(where: str, given: str, choice: Iterable[str]) -> UsageError:
    """Return the error for a word that is not a known one. It suggests a similar word."""
    known = tuple(choice)
    like = difflib.get_close_matches(given, known, n=1)
    meant = f"; did you mean {like[0]}?" if like else ""
    return UsageError(f"{where} is {given!r}; give one of {', '.join(known)}{meant}")
