"""Calls of DCMI according to its header: C functions that write through their pointers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from ctypes import POINTER, c_int, c_uint
from typing import Any

import msgspec
import pytest

from rekindle.agent.devices import dcmi
from rekindle.agent.devices.dcmi import DcmiError, DeviceReadings, NoDcmiError
from rekindle.protocol.monitoring import Condition

# github.com/Ascend/mind-cluster, commit 2c141d42ca7b6b89334dc8ab1876a06df3e849d6,
# component/ascend-common/devmanager/dcmi/dcmi_interface_api.h; each returns int, 0 for success.
HEADER = {
    "dcmi_init": "void",
    "dcmi_get_card_list": "int *card_num, int *card_list, int list_len",
    "dcmi_get_device_num_in_card": "int card_id, int *device_num",
    "dcmi_get_device_logic_id": "int *device_logic_id, int card_id, int device_id",
    "dcmi_get_device_health": "int card_id, int device_id, unsigned int *health",
    "dcmi_get_device_errorcode_v2": "int card_id, int device_id, int *error_count, "
    "unsigned int *error_code_list, unsigned int list_len",
}
MOST_CARDS, MOST_CODES = 64, 128  # the sizes of its callers' arrays there
ABSENT = 0xFFFFFFFF
NOT_READY = -8012


def types_of(declared: str) -> tuple[Any, ...]:
    """Return the ctypes of the parameters that the header declares."""
    found = []
    for each in declared.replace("void", "").split(","):
        if each.strip():
            plain = c_uint if "unsigned" in each else c_int
            found.append(POINTER(plain) if "*" in each else plain)
    return tuple(found)


class CLibrary:
    """Two cards of two chips, with logical numbers 0 to 3, behind functions of C without types."""

    def __init__(self) -> None:
        self.cards = [4, 5]
        self.healths = dict.fromkeys(range(4), 0)
        self.codes: dict[int, list[int]] = {}
        self.statuses: dict[str, int] = {}
        self.claimed: int | None = None  # the reported number of codes; None: the true number
        self._kept = []  # Python must keep a function as long as C uses it
        for name, declared in HEADER.items():
            typed = ctypes.CFUNCTYPE(c_int, *types_of(declared))(self._counted(name))
            self._kept.append(typed)
            address = ctypes.cast(typed, ctypes.c_void_p).value
            setattr(self, name, ctypes.CDLL(None)._FuncPtr(address))

    def _counted(self, name: str) -> Callable[..., int]:
        function = getattr(self, name.removeprefix("dcmi_").removesuffix("_v2"))
        return lambda *arguments: self.statuses.get(name) or function(*arguments)

    def init(self) -> int:
        return 0

    def get_card_list(self, count: Any, cards: Any, length: int) -> int:
        assert length == MOST_CARDS
        count[0] = len(self.cards)
        for number, card in enumerate(self.cards):
            cards[number] = card
        return 0

    def get_device_num_in_card(self, card: int, count: Any) -> int:
        count[0] = 2
        return 0

    def get_device_logic_id(self, number: Any, card: int, chip: int) -> int:
        number[0] = 2 * (card - 4) + chip
        return 0

    def get_device_health(self, card: int, chip: int, health: Any) -> int:
        found = self.healths[2 * (card - 4) + chip]
        health[0] = max(found, 0)
        return min(found, 0)

    def get_device_errorcode(
        self, card: int, chip: int, count: Any, codes: Any, length: int
    ) -> int:
        assert length == MOST_CODES
        has = self.codes.get(2 * (card - 4) + chip, [])
        count[0] = len(has) if self.claimed is None else self.claimed
        for number, code in enumerate(has):
            codes[number] = code
        return 0


def ask(library: object) -> DeviceReadings:
    return dcmi.ask(lambda: library)


def test_prototypes_are_those_of_the_header() -> None:
    """The prototypes match the header, also if another type, such as long, works here as well."""
    assert {name: types_of(declared) for name, declared in HEADER.items()} == dcmi.PROTOTYPES
    assert (dcmi.MOST_CARDS, dcmi.MOST_CODES) == (MOST_CARDS, MOST_CODES)


def test_the_codes_of_each_device() -> None:
    """The answer has each device's codes by logical number, in the spelling of the tables."""
    library = CLibrary()
    library.healths[3], library.codes[3] = 2, [0x80E01801, 0x0100000D]
    well = Condition(0, ())
    devices = {0: well, 1: well, 2: well, 3: Condition(2, ("80E01801", "0100000D"))}
    assert ask(library) == DeviceReadings(devices=devices)


def test_as_many_codes_as_there_is_room_for() -> None:
    library = CLibrary()
    library.codes[0] = [0x80000000 + number for number in range(MOST_CODES)]
    found = ask(library).devices[0].codes
    assert (len(found), found[-1]) == (MOST_CODES, "8000007F")


@pytest.mark.parametrize("claimed", [-1, MOST_CODES + 1])
def test_more_codes_than_there_is_room_for_are_none(claimed: int) -> None:
    """If the reported number of codes does not fit the array, the agent reads none of them."""
    library = CLibrary()
    library.claimed = claimed
    found = ask(library)
    assert not found.devices
    assert found.problems[0] == (
        f"DCMI reports {claimed} codes of chip 0 of card 4; Rekindle reads at most 128"
    )


@pytest.mark.parametrize(
    ("health", "why"),
    [
        (ABSENT, "card 4 does not have a chip 1: DCMI returned health 0xffffffff"),
        (NOT_READY, "dcmi_get_device_health(4, 1) returned -8012"),
    ],
)
def test_one_that_cannot_be_asked_hides_no_other(health: int, why: str) -> None:
    library = CLibrary()
    library.healths[1] = health
    found = ask(library)
    assert (sorted(found.devices), found.problems, found.absent) == ([0, 2, 3], (why,), "")


@pytest.mark.parametrize("name", ["dcmi_init", "dcmi_get_card_list", "dcmi_get_device_num_in_card"])
def test_a_call_that_all_need_fails(name: str) -> None:
    """If a call for all devices fails, the answer has the problem, and DCMI is not absent.

    The next call may succeed.
    """
    library = CLibrary()
    library.statuses[name] = -8005
    found = ask(library)
    assert (found.devices, found.absent) == ({}, "")
    assert [each.endswith("returned -8005") for each in found.problems] == [True]


@pytest.mark.parametrize("name", list(HEADER))
def test_a_library_without_one_of_its_functions(name: str) -> None:
    """A library without one of the functions counts as absent: the agent does not call it again."""
    library = CLibrary()
    delattr(library, name)
    assert ask(library) == DeviceReadings(
        absent=f"libdcmi.so is too old: it does not have the function {name}"
    )


def test_errors_are_typed() -> None:
    """A failed initialization raises DcmiError, not NoDcmiError: a later attempt may succeed."""
    library = CLibrary()
    library.statuses["dcmi_init"] = 1
    with pytest.raises(DcmiError, match=r"dcmi_init\(\) returned 1") as failed:
        dcmi.Dcmi(library)
    assert not isinstance(failed.value, NoDcmiError)


def test_the_loader_is_asked_where_the_driver_has_put_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcmi, "PLACES", ("/nowhere/libdcmi.so", "libdcmi-of-nobody.so"))
    with pytest.raises(NoDcmiError, match=r"cannot load libdcmi\.so: libdcmi-of-nobody\.so"):
        dcmi.load()
    monkeypatch.setattr(dcmi, "PLACES", ("/nowhere/libdcmi.so", "libc.so.6"))
    with pytest.raises(NoDcmiError, match="it does not have the function dcmi_init"):
        dcmi.Dcmi(dcmi.load())


@pytest.mark.process
def test_the_program_says_what_it_has_found_in_one_line() -> None:
    """The program prints one line of JSON on every machine, with or without DCMI."""
    command = [sys.executable, "-m", "rekindle.agent.devices.dcmi"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.count("\n") == 1
    assert isinstance(msgspec.json.decode(output, type=DeviceReadings), DeviceReadings)
