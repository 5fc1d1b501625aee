"""Asks DCMI, the library of Ascend's driver, which fault codes devices have. A program of its own:

    python -m rekindle.agent.devices.dcmi

For a call may stay in the driver for ever, and a library that is not what its header says may take
its process along: an agent that called it could lose all its ranks. It prints `Found` as JSON, in
one line. The prototypes are those of MindCluster's header, which a test names; there was no device
to run them on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_int, c_uint
from typing import Any, Protocol

import msgspec

from rekindle.errors import RekindleError
from rekindle.protocol.monitoring import Condition
from rekindle.recovery.faults.tables.verdict import Severity

PLACES = ("/usr/local/Ascend/driver/lib64/driver/libdcmi.so", "libdcmi.so")
MOST_CARDS, MOST_CODES = 64, 128
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "dcmi_init": (),
    "dcmi_get_card_list": (POINTER(c_int), POINTER(c_int), c_int),
    "dcmi_get_device_num_in_card": (c_int, POINTER(c_int)),
    "dcmi_get_device_logic_id": (POINTER(c_int), c_int, c_int),
    "dcmi_get_device_health": (c_int, c_int, POINTER(c_uint)),
    "dcmi_get_device_errorcode_v2": (c_int, c_int, POINTER(c_int), POINTER(c_uint), c_uint),
}


class DcmiError(RekindleError):
    """DCMI does not answer as it should; it may do so later."""


class NoDcmiError(DcmiError):
    """There is no DCMI here, or one that is too old."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What DCMI has said. devices: by logical number; problems: why not of all.

    absent: why it can never say anything here.
    """

    devices: dict[int, Condition] = {}
    problems: tuple[str, ...] = ()
    absent: str = ""


class Library(Protocol):
    """A loaded library: its functions are its attributes, as those of a ctypes.CDLL are."""

    def __getattr__(self, name: str, /) -> Any: ...


class Dcmi:
    """DCMI's functions. Raises NoDcmiError: one is missing; DcmiError: it cannot begin."""

    def __init__(self, library: Library) -> None:
        self._functions = {}
        for name, argtypes in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise NoDcmiError(f"libdcmi.so is too old: it has no {name}") from error
            function.argtypes, function.restype = argtypes, c_int
            self._functions[name] = function
        self._call("dcmi_init")

    def chips(self) -> Iterator[tuple[int, int]]:
        """Return the card and the number in it of each chip. Raises DcmiError."""
        count, cards = c_int(), (c_int * MOST_CARDS)()
        self._call("dcmi_get_card_list", byref(count), cards, MOST_CARDS)
        for card in cards[: _within(count.value, MOST_CARDS, "cards")]:
            chips = c_int()
            self._call("dcmi_get_device_num_in_card", card, byref(chips))
            for chip in range(chips.value):
                yield card, chip

    def logical(self, card: int, chip: int) -> int:
        """Return the number that the ranks' environment knows a chip by. Raises DcmiError."""
        number = c_int()
        self._call("dcmi_get_device_logic_id", byref(number), card, chip)
        return number.value

    def condition(self, card: int, chip: int) -> Condition:
        """Return how a chip is. Raises DcmiError."""
        health, count, codes = c_uint(), c_int(), (c_uint * MOST_CODES)()
        self._call("dcmi_get_device_health", card, chip, byref(health))
        if health.value > max(Severity):  # 0xFFFFFFFF
            raise DcmiError(f"chip {chip} of card {card} is not there: health {health.value:#x}")
        at = (card, chip)
        self._call("dcmi_get_device_errorcode_v2", *at, byref(count), codes, MOST_CODES)
        known = codes[: _within(count.value, MOST_CODES, f"codes of chip {chip} of card {card}")]
        return Condition(Severity(health.value), tuple(f"{code:08X}" for code in known if code))

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            numbers = ", ".join(str(each) for each in arguments if isinstance(each, int))
            raise DcmiError(f"{name}({numbers}) returned {status}")


def _within(count: int, most: int, what: str) -> int:
    if not 0 <= count <= most:
        raise DcmiError(f"DCMI says that there are {count} {what}; it was given room for {most}")
    return count


def load() -> Library:
    """Load DCMI from where the driver puts it, else as the loader finds it. Raises NoDcmiError."""
    for place in PLACES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            why = str(error)
    raise NoDcmiError(f"libdcmi.so cannot be loaded: {why}")


def ask(loaded: Callable[[], Library]) -> Found:
    """Return how all devices are; one that cannot be asked keeps nobody from the others."""
    devices, problems = dict[int, Condition](), list[str]()
    try:
        dcmi = Dcmi(loaded())
        for card, chip in dcmi.chips():
            try:
                devices[dcmi.logical(card, chip)] = dcmi.condition(card, chip)
            except DcmiError as error:
                problems.append(str(error))
    except NoDcmiError as error:
        return Found(absent=str(error))
    except DcmiError as error:
        problems.append(str(error))
    return Found(devices=devices, problems=tuple(problems))


if __name__ == "__main__":
    print(msgspec.json.encode(ask(load)).decode())
