"""What MindCluster's JSON documents say of one host. Pure."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.errors import DamagedError
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity

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


_CHIP = re.compile(r".*-([0-9]{1,4})")


class Topic(str, enum.Enum):
    """What of a host is spoken of; each is known, or damaged, alone."""

    CHIPS = "chips"
    SWITCHES = "switches"
    BOARD = "board"


class ActiveCode(msgspec.Struct, frozen=True):
    """A fault code that is present. chip: its number on the host; -1: it is of no chip.

    severity: for a code that no table lists: MINOR where MindCluster lets training go on.
    """

    code: str
    chip: int
    origin: FaultOrigin
    severity: Severity | None = None


class Report(msgspec.Struct, frozen=True):
    """What is known of one topic. updated: when it was written, in seconds; 0: it does not say.

    remarks: what has no code: (chip or -1, sentence about it).
    """

    faults: tuple[ActiveCode, ...] = ()
    remarks: tuple[tuple[int, str], ...] = ()
    updated: int = 0


class Told(msgspec.Struct, frozen=True):
    """What a ConfigMap tells about a topic of a host: a report, or why it is not trusted."""

    host: str
    topic: Topic
    report: Report | None = None
    damage: str = ""


def chip_number(npu_name: str) -> int:
    """Return a chip's number on its host: Ascend910-4, npu-4; -1: none is named."""
    match = _CHIP.fullmatch(npu_name.strip())
    return int(match[1]) if match else -1


def chip_numbers(npu_names: str) -> tuple[int, ...]:
    """Return the numbers of chips that are named with commas between them, in their order."""
    return tuple(sorted({chip_number(name) for name in npu_names.split(",")} - {-1}))
