"""The JSON in MindCluster's ConfigMaps: whole and of the right form, or refused. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.errors import DamagedError

T = TypeVar("T")


def text_of(configmap: Object, key: str) -> str | None:
    """Return what stands under a key; None: there is none. Raises DamagedError: it is no text."""
    data = configmap.get("data") or {}
    found = data.get(key) if isinstance(data, Mapping) else data
    if found is not None and not isinstance(found, str):
        raise DamagedError(f"{name_of(configmap)}: {key} is no text")
    return found


def name_of(configmap: Object) -> str:
    """Return what a ConfigMap is called."""
    return str(configmap["metadata"]["name"])


def decode(text: str | msgspec.Raw, kind: type[T], what: str) -> T:
    """Decode JSON. what: names it. Raises DamagedError: it is torn, or of another form."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DamagedError(f"{what} cannot be read: {error}") from error


def check(content: bytes, code: Any, what: str) -> None:
    """Compare a check code: SHA-256 of the JSON as its writer has put it, in hexadecimal.

    Raises DamagedError: they differ.
    """
    if hashlib.sha256(content).hexdigest() != code:
        raise DamagedError(f"{what}: its check code is wrong: it was torn, or changed by hand")
