"""A checker measures a device through MindSpore; here its CPU device, without an NPU."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping

import msgspec
import pytest
from mindspore_jobs.job import PYTHON, ROOT, needs_mindspore
from repository import SUPPORT

from rekindle import names
from rekindle.protocol.node_check import CheckerAnswer, DeviceWork, Done, Open
from rekindle.rank.channel import MAX_MESSAGE
from rekindle.recovery.node_check.evidence import Measurement, lacks_memory

pytestmark = [needs_mindspore, pytest.mark.timeout(120)]
SCRIPT = SUPPORT / "mindspore_jobs" / "check.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"}
CHOICE = """
import sys
from rekindle.training.node_check import numpy_checker

numpy_checker.count_npus = lambda: int(sys.argv[1])
device = numpy_checker.device_for(0)
print(type(device).__name__, "mindspore" in sys.modules, device.note, sep="|")
"""


# The checkers by name: MindSpore's name of the kind of device, and the simulated error.
CHECKERS = {
    "sound": ("CPU", ""),
    "product": ("CPU", "product"),
    "copy": ("CPU", "copy"),
    "Ascend": ("Ascend", ""),
}
Lines = Mapping[str, socket.socket]


@pytest.fixture(scope="module")
def lines() -> Iterator[Lines]:
    """Start the checkers; return the connections to them."""
    own: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as kept:
        for name, (target, wrong) in CHECKERS.items():
            own[name], other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            more = {"LOCAL_RANK": "1", names.ENV_CHANNEL_FD: str(other.fileno())}
            command = [str(PYTHON), str(SCRIPT), target, wrong]
            with other:
                kept.enter_context(
                    subprocess.Popen(command, env=ENVIRONMENT | more, pass_fds=[other.fileno()])
                )
            kept.enter_context(own[name])  # a checker ends when its connection closes
        yield own


def receive(connection: socket.socket) -> CheckerAnswer:
    """Return the checker's next message."""
    return msgspec.msgpack.decode(connection.recv(MAX_MESSAGE), type=CheckerAnswer)


def answer(connection: socket.socket) -> Done:
    """Order a measurement and return the checker's answer."""
    assert isinstance(receive(connection), Open)
    connection.send(msgspec.msgpack.encode(DeviceWork(serial=7)))
    done = receive(connection)
    assert isinstance(done, Done)
    assert done.serial == 7
    return done


def test_a_device_is_measured(lines: Lines) -> None:
    """A sound device has times for a product and a copy, and no error."""
    done = answer(lines["sound"])
    assert done.error == ""
    assert done.seconds.keys() == {Measurement.COMPUTE, Measurement.MEMORY}
    assert all(0 < seconds < 1 for seconds in done.seconds.values())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("product", "WrongResultError: a product of matrices is wrong"),
        ("copy", "WrongResultError: a copy in memory has wrong values"),
    ],
)
def test_what_mindspore_makes_is_compared(wrong: str, text: str, lines: Lines) -> None:
    """A wrong product or copy of MindSpore gives an error."""
    assert answer(lines[wrong]).error == text


def test_a_device_that_cannot_be_used_is_a_fault(lines: Lines) -> None:
    """A device that MindSpore cannot use is an error before any work, as Ascend here."""
    message = receive(lines["Ascend"])
    assert isinstance(message, Done)
    assert message.error.startswith("RuntimeError: Unsupported device target Ascend")
    assert not lacks_memory(message.error)


@pytest.mark.parametrize(
    ("npus", "chosen"),
    [
        (0, "Processor|False|"),
        (
            8,
            "Processor|True|the check did not measure the NPUs, because MindSpore cannot use "
            "them on this node",
        ),
    ],
)
def test_mindspore_is_imported_only_where_there_are_npus(npus: int, chosen: str) -> None:
    """A checker imports MindSpore only on a node with NPUs.

    If MindSpore cannot use them, as here without CANN, the note reports that.
    """
    command = [PYTHON, "-c", CHOICE, str(npus)]
    output = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == chosen
