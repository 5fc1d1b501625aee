"""Define which times ranks record, the limits of the files, and the interval of writes. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from rekindle import names
from rekindle.errors import UsageError

MEBIBYTE = 1024 * 1024
MOST_FLUSH_S = 3600.0
_MOST_MB = 10**9
ON, OFF = "on", "off"

# in the order of the fields
FIELDS = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")


class RecordLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the limits of the records.

    `cap_bytes` limits all files together. `file_bytes` limits one file; a rank then starts another.
    `flush_s` is the interval of writes; a killed rank loses the records of at most this time.
    """

    cap_bytes: int = 5000 * MEBIBYTE
    file_bytes: int = 10 * MEBIBYTE
    flush_s: float = 5.0


def limits_in(environment: Mapping[str, str], say: Callable[[str], None]) -> RecordLimits:
    """Return the limits from the environment; `say` and ignore invalid values.

    A wrong limit of records must not end training.
    """
    usual = RecordLimits()
    figure = functools.partial(_figure, say, environment)
    cap = figure(names.ENV_PROFILING_CAP_MB, usual.cap_bytes / MEBIBYTE, _MOST_MB)
    file = figure(names.ENV_PROFILING_FILE_MB, usual.file_bytes / MEBIBYTE, _MOST_MB)
    flush_s = figure(names.ENV_PROFILING_FLUSH_S, usual.flush_s, MOST_FLUSH_S)
    return RecordLimits(
        cap_bytes=int(cap * MEBIBYTE), file_bytes=int(file * MEBIBYTE), flush_s=flush_s
    )


def _figure(
    say: Callable[[str], None],
    environment: Mapping[str, str],
    name: str,
    usual: float,
    most: float,
) -> float:
    text = environment.get(name, "")
    if not text:
        return usual
    try:
        figure = float(text)
    except ValueError:
        figure = 0.0
    if 0 < figure <= most:  # NaN fails this comparison
        return figure
    say(
        f"{name} is {text!r}, which is not a number above 0 and at most {most:g}; Rekindle uses "
        f"{usual:g}"
    )
    return usual


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """State which times ranks record. All except `communication` switch together.

    `communication` writes a record for each collective, so it costs the most.
    """

    communication: bool = False
    step: bool = False
    save_checkpoint: bool = False
    forward: bool = False
    data_loader: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Return the names of the kinds that are on, as users write them."""
        return tuple(word for word in WORDS if getattr(self, word.replace("-", "_")))


WORDS = tuple(name.replace("_", "-") for name in Switch.__struct_fields__)


class ProfilingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Hold an order to switch these kinds on or off.

    Without kinds, "on" concerns the four kinds that switch together, and "off" concerns all kinds.
    """

    on: bool
    kinds: tuple[str, ...] = ()
    by: str = ""


def switched(now: Switch, kinds: Iterable[str], *, on: bool) -> Switch:
    """Return the switch after some kinds become on or off.

    Raises UsageError: WORDS does not contain a kind, or a kind cannot be off separately.
    """
    asked = switch_of(kinds)  # checks the words
    if on:
        return switch_of((*now.words, *asked.words) or ("step",))
    others = set(kinds) - {"communication"}
    if not others and asked.communication:
        return msgspec.structs.replace(now, communication=False)
    if others and now.communication and not asked.communication:
        raise UsageError(
            f"MindCluster switches {', '.join(sorted(others))} off only together with "
            "communication; add communication, or give no kinds"
        )
    return Switch()


def switch_of(words: Iterable[str]) -> Switch:
    """Return the switch with these kinds on; without kinds, all are off.

    All kinds except communication are on if any kind is on, because MindCluster supports no other
    state. Raises UsageError: WORDS does not contain a word.
    """
    asked = set(words)
    if strange := sorted(asked - set(WORDS)):
        raise UsageError(
            f"{', '.join(strange)} is not a kind of record; choose from {', '.join(WORDS)}"
        )
    others = bool(asked)
    return Switch(
        communication="communication" in asked,
        step=others,
        save_checkpoint=others,
        forward=others,
        data_loader=others,
    )


def values(switch: Switch) -> list[str]:
    """Return MindCluster's values for on and off, in the order of FIELDS."""
    return [ON if on else OFF for on in msgspec.structs.astuple(switch)]


def read_switch(words: dict[str, str]) -> Switch:
    """Read MindCluster's switch as TaskD does.

    Collectives are on if their field is on. The four other kinds are on unless all five fields are
    off; a missing field is not off.
    """
    if all(words.get(field) == OFF for field in FIELDS):
        return Switch()
    return msgspec.structs.replace(switch_of(("step",)), communication=words.get(FIELDS[0]) == ON)
