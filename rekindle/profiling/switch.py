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


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants these kinds on or off; without kinds: the four that go together, or all."""

    on: bool
    kinds: tuple[str, ...] = ()
    by: str = ""


def switched(now: Switch, kinds: Iterable[str], *, on: bool) -> Switch:
    """Return the switch after some kinds are put on or off.

    Raises UsageError: a kind is none of WORDS, or cannot be off by itself.
    """
    asked = switch_of(kinds)  # looks at the words
    if on:
        return switch_of((*now.words, *asked.words) or ("step",))
    others = set(kinds) - {"communication"}
    if not others and asked.communication:
        return msgspec.structs.replace(now, communication=False)
    if others and now.communication and not asked.communication:
        raise UsageError(
            f"{', '.join(sorted(others))}: off only together with communication, as MindCluster "
            "has it: name that, too, or no kinds at all"
        )
    return Switch()


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
