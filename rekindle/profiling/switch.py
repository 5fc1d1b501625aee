"""Which times are written down: the five kinds, and what may be on without what. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rekindle.errors import UsageError

ON, OFF = "on", "off"


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """Which times are written down. All but those of communication go together.

    communication: of collectives, which slows training down.
    """

    communication: bool = False
    step: bool = False
    save_checkpoint: bool = False
    forward: bool = False
    data_loader: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """What is on, as people write it."""
        return tuple(word for word in WORDS if getattr(self, word.replace("-", "_")))


WORDS = tuple(name.replace("_", "-") for name in Switch.__struct_fields__)
FIELDS = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")  # in that order


def switch_of(words: Iterable[str]) -> Switch:
    """Return the switch that has these on; none: all are off.

    All but communication are on as soon as anything is: MindCluster knows no other way. Raises
    UsageError: a word is none of WORDS.
    """
    asked = set(words)
    if strange := sorted(asked - set(WORDS)):
        raise UsageError(f"{', '.join(strange)}: no such trace; give some of {', '.join(WORDS)}")
    others = bool(asked)
    return Switch(
        communication="communication" in asked,
        step=others,
        save_checkpoint=others,
        forward=others,
        data_loader=others,
    )


def values(switch: Switch) -> list[str]:
    """Return what MindCluster calls on and off, in the order of FIELDS."""
    return [ON if on else OFF for on in msgspec.structs.astuple(switch)]


def read_switch(said: dict[str, str]) -> Switch:
    """Read what MindCluster's switch says; what it leaves out is off."""
    on = (said.get(field) == ON for field in FIELDS)
    return Switch(**dict(zip(Switch.__struct_fields__, on, strict=True)))
