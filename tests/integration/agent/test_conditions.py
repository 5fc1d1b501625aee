"""How an agent learns the fault codes of its devices, and when it tells them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from waiting import bound_s, finished

from rekindle.agent.devices import tools as conditions
from rekindle.agent.devices import tools as device_tools
from rekindle.agent.devices.dcmi import Found
from rekindle.agent.devices.tools import DeviceMonitor
from rekindle.errors import ProtocolError
from rekindle.protocol.agent import Conditions, Message, decode_from_agent, encode
from rekindle.protocol.monitoring import Condition

WELL, SICK = Condition(0, ()), Condition(2, ("80E01801",))


class Node:
    """A node with two devices, and what its agent has told. says: the program that asks DCMI."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids = {0: 10, 1: 11}
        self.told: list[Message] = []
        self.watch = DeviceMonitor(lambda: dict(self.pids), self.told.append)
        self._program = folder / "dcmi"
        monkeypatch.setattr(device_tools, "ASK_DCMI", (str(self._program),))
        monkeypatch.setattr(device_tools, "NPU_MANAGER", folder)

    def runs(self, script: str) -> None:
        self._program.write_text(f"#!/bin/sh\n{script}\n")
        self._program.chmod(0o755)

    def says(self, *devices: Condition, **more: object) -> None:
        found = Found(devices=dict(enumerate(devices)), **more)
        self.runs(f"echo of the driver; echo '{msgspec.json.encode(found).decode()}'")

    def look(self) -> bool:
        return asyncio.run(self.watch.look())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Whose devices are those that the machine has."""
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return Node(tmp_path, monkeypatch)


def test_what_is_well_and_stays_so_is_told_once(node: Node) -> None:
    """At first, for whoever watched before may have left codes that are gone."""
    node.says(WELL, WELL)
    assert [node.look(), node.look()] == [True, True]
    assert node.told == [Conditions(devices={0: WELL, 1: WELL})]


def test_codes_are_told_as_long_as_they_are_there_and_once_when_gone(node: Node) -> None:
    node.says(WELL, SICK)
    node.look()
    node.look()
    node.says(WELL, WELL)
    node.look()
    node.look()
    sick = Conditions(devices={0: WELL, 1: SICK})
    assert node.told == [sick, sick, Conditions(devices={0: WELL, 1: WELL})]


def test_devices_have_the_numbers_of_their_ranks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not this node's are nobody's business here."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,9")
    node.says(SICK, SICK, WELL)
    node.look()
    assert node.told == [Conditions(devices={0: WELL})]


def test_what_was_read_while_a_process_came_is_not_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device may have been reset between; one whose process has just died is told."""
    real = device_tools.conditions

    async def meanwhile(devices: dict[int, int]) -> Found:
        node.pids[0] = 12
        return await real(devices)

    node.pids[1] = 0
    monkeypatch.setattr(device_tools, "conditions", meanwhile)
    node.says(SICK, SICK)
    node.look()
    assert node.told == [Conditions(devices={1: SICK})]


def test_a_health_that_there_is_not_is_no_message() -> None:
    """The coordinator reads it as the severity of codes."""
    said = Conditions(devices={1: SICK})
    assert decode_from_agent(encode(said)) == said
    with pytest.raises(ProtocolError):
        decode_from_agent(encode(Conditions(devices={1: Condition(4, ())})))


def test_nobody_is_asked_before_ranks_were_started(node: Node) -> None:
    """The coordinator would not hear it: this may be a spare."""
    node.pids.clear()
    assert node.look()
    assert node.told == []


def test_where_there_is_no_dcmi_that_is_said_once_and_all_else_goes_on(
    node: Node, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "LOOK_S", 0.0)
    node.says(absent="libdcmi.so is too old: it does not have the function dcmi_init")
    asyncio.run(finished(node.watch.run()))
    said = (
        "the agent does not read the fault codes of devices: libdcmi.so is too old: "
        "it does not have the function dcmi_init"
    )
    assert capfd.readouterr().err == f"rekindle agent: {said}\n"
    assert node.told == []


def test_without_npus_nothing_is_asked_or_said(
    node: Node, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tools, "NPU_MANAGER", Path("/nowhere"))
    asyncio.run(finished(node.watch.run()))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "expires_s", "said"),
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
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver that crashes whoever calls it, or keeps him, costs the agent nothing."""
    monkeypatch.setattr(device_tools, "ASK_TIMEOUT_S", expires_s or bound_s())
    node.runs(script)
    assert [node.look(), node.look()] == [True, True]
    told = capfd.readouterr().err
    assert (told.count("rekindle agent"), said in told) == (1, True)
    monkeypatch.setattr(device_tools, "ASK_TIMEOUT_S", bound_s())
    node.says(SICK)
    node.look()
    assert node.told == [Conditions(devices={0: SICK})]


def test_a_bug_costs_one_look(
    node: Node, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([ValueError("of ours"), Found(devices={0: SICK}), Found(absent="gone")])

    async def broken(devices: dict[int, int]) -> Found:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(conditions, "LOOK_S", 0.0)
    monkeypatch.setattr(device_tools, "conditions", broken)
    asyncio.run(finished(node.watch.run()))
    assert node.told == [Conditions(devices={0: SICK})]
    assert "ValueError('of ours')" in capfd.readouterr().err
