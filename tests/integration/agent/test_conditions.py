"""How an agent reads the fault codes of its devices, and when it reports them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from waiting import bound_s, finished

from rekindle.agent.devices import tools as conditions
from rekindle.agent.devices import tools as device_tools
from rekindle.agent.devices.dcmi import DeviceReadings
from rekindle.agent.devices.tools import DeviceMonitor
from rekindle.errors import ProtocolError
from rekindle.protocol.agent import Conditions, Message, decode_from_agent, encode
from rekindle.protocol.monitoring import Condition

WELL, SICK = Condition(0, ()), Condition(2, ("80E01801",))


class Node:
    """A node with two devices, and the messages of its agent.

    `says` sets the answer of the program that reads DCMI.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids = {0: 10, 1: 11}
        self.sent: list[Message] = []
        self.watch = DeviceMonitor(lambda: dict(self.pids), self.sent.append)
        self._program = folder / "dcmi"
        monkeypatch.setattr(device_tools, "ASK_DCMI", (str(self._program),))
        monkeypatch.setattr(device_tools, "NPU_MANAGER", folder)

    def runs(self, script: str) -> None:
        self._program.write_text(f"#!/bin/sh\n{script}\n")
        self._program.chmod(0o755)

    def says(self, *devices: Condition, **more: object) -> None:
        found = DeviceReadings(devices=dict(enumerate(devices)), **more)
        self.runs(f"echo of the driver; echo '{msgspec.json.encode(found).decode()}'")

    def check(self) -> bool:
        return asyncio.run(self.watch.check())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return a node whose environment makes all devices visible."""
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return Node(tmp_path, monkeypatch)


def test_what_is_well_and_stays_so_is_told_once(node: Node) -> None:
    """The agent reports healthy devices in its first message only.

    It does so because an earlier agent may have reported codes that no longer exist.
    """
    node.says(WELL, WELL)
    assert [node.check(), node.check()] == [True, True]
    assert node.sent == [Conditions(devices={0: WELL, 1: WELL})]


def test_codes_are_told_as_long_as_they_are_there_and_once_when_gone(node: Node) -> None:
    node.says(WELL, SICK)
    node.check()
    node.check()
    node.says(WELL, WELL)
    node.check()
    node.check()
    sick = Conditions(devices={0: WELL, 1: SICK})
    assert node.sent == [sick, sick, Conditions(devices={0: WELL, 1: WELL})]


def test_devices_have_the_numbers_of_their_ranks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If devices 2 and 9 are visible, the agent reports device 2 as device 0, and no other."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,9")
    node.says(SICK, SICK, WELL)
    node.check()
    assert node.sent == [Conditions(devices={0: WELL})]


def test_what_was_read_while_a_process_came_is_not_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent does not report a device whose process started during the read.

    The device may have been reset in between. If the process has only ended, the agent reports it.
    """
    real = device_tools.conditions

    async def meanwhile(devices: dict[int, int]) -> DeviceReadings:
        node.pids[0] = 12
        return await real(devices)

    node.pids[1] = 0
    monkeypatch.setattr(device_tools, "conditions", meanwhile)
    node.says(SICK, SICK)
    node.check()
    assert node.sent == [Conditions(devices={1: SICK})]


def test_a_health_that_there_is_not_is_no_message() -> None:
    """A device health outside the known severities is a protocol error.

    The coordinator uses the health as the severity of the fault codes.
    """
    message = Conditions(devices={1: SICK})
    assert decode_from_agent(encode(message)) == message
    with pytest.raises(ProtocolError):
        decode_from_agent(encode(Conditions(devices={1: Condition(4, ())})))


def test_nobody_is_asked_before_ranks_were_started(node: Node) -> None:
    """Without ranks the agent reports no devices: the coordinator would ignore a spare's report."""
    node.pids.clear()
    assert node.check()
    assert node.sent == []


def test_where_there_is_no_dcmi_that_is_said_once_and_all_else_goes_on(
    node: Node, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "LOOK_S", 0.0)
    node.says(absent="libdcmi.so is too old: it does not have the function dcmi_init")
    asyncio.run(finished(node.watch.run()))
    text = (
        "the agent does not read the fault codes of devices: libdcmi.so is too old: "
        "it does not have the function dcmi_init"
    )
    assert capfd.readouterr().err == f"rekindle: {text}\n"
    assert node.sent == []


def test_without_npus_nothing_is_asked_or_said(
    node: Node, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tools, "NPU_MANAGER", Path("/nowhere"))
    asyncio.run(finished(node.watch.run()))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "expires_s", "text"),
    [
        ("kill -SEGV $$", None, "ended with status -11"),
        ("echo no", None, "said 'no'"),
        ("exec sleep infinity", 0.3, "took more than 0.3 s"),
    ],
)
def test_a_look_that_fails_is_said_once_and_the_next_may_do(
    node: Node,
    script: str,
    expires_s: float | None,
    text: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent logs once that DCMI's program crashes, prints garbage or hangs, and reads again."""
    monkeypatch.setattr(device_tools, "ASK_TIMEOUT_S", expires_s or bound_s())
    node.runs(script)
    assert [node.check(), node.check()] == [True, True]
    output = capfd.readouterr().err
    assert (output.count("rekindle: "), text in output) == (1, True)
    monkeypatch.setattr(device_tools, "ASK_TIMEOUT_S", bound_s())
    node.says(SICK)
    node.check()
    assert node.sent == [Conditions(devices={0: SICK})]


def test_a_bug_costs_one_look(
    node: Node, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(
        [ValueError("of ours"), DeviceReadings(devices={0: SICK}), DeviceReadings(absent="gone")]
    )

    async def broken(devices: dict[int, int]) -> DeviceReadings:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(conditions, "LOOK_S", 0.0)
    monkeypatch.setattr(device_tools, "conditions", broken)
    asyncio.run(finished(node.watch.run()))
    assert node.sent == [Conditions(devices={0: SICK})]
    assert "ValueError('of ours')" in capfd.readouterr().err
