"""Decode MindCluster's JSON documents about one host. Pure."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity

T = TypeVar("T")
_CHIP = re.compile(r".*-([0-9]{1,4})")


def text_of(configmap: Object, key: str) -> str | None:
    """Return the text under a key; None: the key is absent. Raises DamagedError: it is not text."""
    data = configmap.get("data") or {}
    found = data.get(key) if isinstance(data, Mapping) else data
    if found is not None and not isinstance(found, str):
        raise DamagedError(f"{name_of(configmap)}: {key} is not text")
    return found


def name_of(configmap: Object) -> str:
    """Return the name of a ConfigMap."""
    return str(configmap["metadata"]["name"])


def decode(text: str | msgspec.Raw, kind: type[T], what: str) -> T:
    """Decode JSON. what: its name. Raises DamagedError: it is incomplete, or has another form."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DamagedError(f"Rekindle cannot read {what}: {error}") from error


def check(content: bytes, code: Any, what: str) -> None:
    """Compare a check code: the hexadecimal SHA-256 of the JSON text as written.

    Raises DamagedError: they differ.
    """
    if hashlib.sha256(content).hexdigest() != code:
        raise DamagedError(
            f"{what} has a wrong check code, because it is incomplete or a person changed it"
        )


class Topic(str, enum.Enum):
    """A topic of a host. A topic can be damaged while others are known."""

    CHIPS = "chips"
    SWITCHES = "switches"
    BOARD = "board"


class ActiveCode(msgspec.Struct, frozen=True):
    """A present fault code. chip: its number on the host; -1: it does not concern one chip.

    severity: for a code that no table lists: what MindCluster's own level stands for.
    """

    code: str
    chip: int
    origin: FaultOrigin
    severity: Severity | None = None


class Report(msgspec.Struct, frozen=True):
    """The state of one topic. updated: when it was written, in seconds; 0: unknown.

    remarks: problems without a code, each as (chip or -1, sentence).
    """

    faults: tuple[ActiveCode, ...] = ()
    remarks: tuple[tuple[int, str], ...] = ()
    updated: int = 0


class TopicReport(msgspec.Struct, frozen=True):
    """A ConfigMap's data on a topic of a host: a report, or the damage that makes it unusable."""

    host: str
    topic: Topic
    report: Report | None = None
    damage: str = ""


def chip_number(npu_name: str) -> int:
    """Return a chip's number on its host from a name such as Ascend910-4, npu-4; -1: no number."""
    match = _CHIP.fullmatch(npu_name.strip())
    return int(match[1]) if match else -1


def chip_numbers(npu_names: str) -> tuple[int, ...]:
    """Return the sorted numbers of the chips in a list with commas."""
    return tuple(sorted({chip_number(name) for name in npu_names.split(",")} - {-1}))
