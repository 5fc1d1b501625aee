"""Asks DCMI, the library of Ascend's driver, for the fault codes of devices. It is a program:

    python -m rekindle.agent.devices.dcmi

A call may hang in the driver, and a library that differs from its header may crash its process. In
the agent this could end all ranks, so it runs in its own process. It prints `Found` as JSON, in one
line. The prototypes are those of MindCluster's header, which a test names; there was no device for
a test.
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
    """DCMI does not answer correctly; it may do so later."""


class NoDcmiError(DcmiError):
    """This machine has no DCMI, or one that is too old."""


class DeviceReadings(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of DCMI. devices: by logical number; problems: the errors for the other devices.

    absent: why it can never answer on this machine.
    """

    devices: dict[int, Condition] = {}
    problems: tuple[str, ...] = ()
    absent: str = ""


class Library(Protocol):
    """A loaded library: its attributes are its functions, as for a ctypes.CDLL."""

    def __getattr__(self, name: str, /) -> Any: ...


class Dcmi:
    """DCMI's functions. Raises NoDcmiError: one is missing; DcmiError: the initialization fails."""

    def __init__(self, library: Library) -> None:
        self._functions = {}
        for name, argtypes in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise NoDcmiError(
                    f"libdcmi.so is too old: it does not have the function {name}"
                ) from error
            function.argtypes, function.restype = argtypes, c_int
            self._functions[name] = function
        self._call("dcmi_init")

    def chips(self) -> Iterator[tuple[int, int]]:
        """Yield the card of each chip, and its number there. Raises DcmiError: a call fails."""
        count, cards = c_int(), (c_int * MOST_CARDS)()
        self._call("dcmi_get_card_list", byref(count), cards, MOST_CARDS)
        for card in cards[: _within(count.value, MOST_CARDS, "cards")]:
            chips = c_int()
            self._call("dcmi_get_device_num_in_card", card, byref(chips))
            for chip in range(chips.value):
                yield card, chip

    def logical(self, card: int, chip: int) -> int:
        """Return the chip's number in the ranks' environment. Raises DcmiError: the call fails."""
        number = c_int()
        self._call("dcmi_get_device_logic_id", byref(number), card, chip)
        return number.value

    def condition(self, card: int, chip: int) -> Condition:
        """Return the condition of a chip. Raises DcmiError: a call fails, or the chip is absent."""
        health, count, codes = c_uint(), c_int(), (c_uint * MOST_CODES)()
        self._call("dcmi_get_device_health", card, chip, byref(health))
        if health.value > max(Severity):  # 0xFFFFFFFF
            raise DcmiError(
                f"card {card} does not have a chip {chip}: DCMI returned health {health.value:#x}"
            )
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
        raise DcmiError(f"DCMI reports {count} {what}; Rekindle reads at most {most}")
    return count


def load() -> Library:
    """Load DCMI from the driver's folder, or by the loader. Raises NoDcmiError: both fail."""
    for place in PLACES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            why = str(error)
    raise NoDcmiError(f"Rekindle cannot load libdcmi.so: {why}")


def ask(loaded: Callable[[], Library]) -> DeviceReadings:
    """Return the conditions of all devices; an error of one device does not affect the others."""
    devices, problems = dict[int, Condition](), list[str]()
    try:
        dcmi = Dcmi(loaded())
        for card, chip in dcmi.chips():
            try:
                devices[dcmi.logical(card, chip)] = dcmi.condition(card, chip)
            except DcmiError as error:
                problems.append(str(error))
    except NoDcmiError as error:
        return DeviceReadings(absent=str(error))
    except DcmiError as error:
        problems.append(str(error))
    return DeviceReadings(devices=devices, problems=tuple(problems))


if __name__ == "__main__":
    print(msgspec.json.encode(ask(load)).decode())
