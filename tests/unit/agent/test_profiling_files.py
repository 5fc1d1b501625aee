"""MindCluster's switch in a pod: the agent's reports about it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from waiting import finished

from rekindle.agent.profiling_files import ProfilingFiles
from rekindle.profiling.switch import FIELDS, Switch, switch_of
from rekindle.protocol.agent import Message, ProfilingSwitchRead

ALL = switch_of(("communication",))


def text(**on: bool) -> str:
    return json.dumps({name: "on" if on.get(name) else "off" for name in FIELDS})


@pytest.fixture
def messages() -> list[Message]:
    return []


@pytest.fixture
def care(tmp_path: Path, messages: list[Message]) -> ProfilingFiles:
    return ProfilingFiles(
        tmp_path, lambda: (0,), messages.append, lambda: None, tmp_path / "switch"
    )


def test_what_is_new_is_told_once(
    care: ProfilingFiles, messages: list[Message], tmp_path: Path
) -> None:
    """The agent reports each change of the switch once, and a missing switch never."""
    asyncio.run(care.report_switch())
    assert not messages
    (tmp_path / "switch").write_text(text())
    asyncio.run(care.report_switch())
    (tmp_path / "switch").write_text(text(Step=True))
    asyncio.run(care.report_switch())
    asyncio.run(care.report_switch())
    (tmp_path / "switch").write_text(text(CommunicationOperator=True))
    asyncio.run(care.report_switch())
    (tmp_path / "switch").write_text(text())
    asyncio.run(care.report_switch())
    assert messages == [
        ProfilingSwitchRead(switch=Switch()),
        ProfilingSwitchRead(switch=switch_of(("step",))),
        ProfilingSwitchRead(switch=ALL),
        ProfilingSwitchRead(switch=Switch()),
    ]


def test_a_switch_that_a_mount_exchanges(
    care: ProfilingFiles, messages: list[Message], tmp_path: Path
) -> None:
    """The agent reads a switch that Kubernetes replaces with a link.

    The switch may be missing for a short time.
    """
    for number in range(2):
        (tmp_path / str(number)).write_text(text(Step=not number))
        link = tmp_path / "link"
        link.symlink_to(tmp_path / str(number))
        link.replace(tmp_path / "switch")
        asyncio.run(care.report_switch())
        (tmp_path / str(number)).unlink()
        asyncio.run(care.report_switch())
    assert messages == [
        ProfilingSwitchRead(switch=switch_of(("step",))),
        ProfilingSwitchRead(switch=Switch()),
    ]


@pytest.mark.parametrize("wrong", ["", "{", "[]", '{"Step": 1}', "\x00"])
def test_a_switch_that_is_not_understood(
    wrong: str,
    care: ProfilingFiles,
    messages: list[Message],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The agent reports an invalid switch once, and keeps the previous one."""
    (tmp_path / "switch").write_text(wrong)
    asyncio.run(care.report_switch())
    asyncio.run(care.report_switch())
    assert not messages
    assert capfd.readouterr().err.count("is invalid and has no effect") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("read-only"), "the agent cannot read the profiling records: read-only"),
        (OverflowError("too large"), "a bug in Rekindle: OverflowError('too large')\nTraceback"),
    ],
)
def test_nothing_that_is_spoilt_ends_it(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """After a read error the agent tries again, and reports the error once.

    A report of a bug has the traceback.
    """
    monkeypatch.setattr("rekindle.agent.profiling_files._TICK_S", 0.001)
    (tmp_path / "switch").write_bytes(b"\xff")
    asyncio.run(_look_three_times(tmp_path, error))
    shown = capfd.readouterr().err
    assert shown.count("is invalid and has no effect") == 1
    assert shown.count(message) == 1


async def _look_three_times(folder: Path, error: Exception) -> None:
    looked, loop, reads = asyncio.Event(), asyncio.get_running_loop(), iter(range(1000))

    def read() -> None:
        if next(reads) < 3:
            raise error
        loop.call_soon_threadsafe(looked.set)

    care = ProfilingFiles(folder, lambda: (0,), lambda _: None, read, folder / "switch")
    running = asyncio.ensure_future(care.run())
    await finished(looked.wait())
    running.cancel()


def test_records_age_also_where_they_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the agent cannot read records, it still removes old ones."""
    monkeypatch.setattr("rekindle.agent.profiling_files._TICK_S", 0.001)

    async def until_they_age() -> None:
        aged, loop = asyncio.Event(), asyncio.get_running_loop()

        def read() -> None:
            raise OSError("gone")

        def own() -> tuple[int, ...]:
            loop.call_soon_threadsafe(aged.set)
            return ()

        care = ProfilingFiles(tmp_path, own, lambda _: None, read, tmp_path / "switch")
        running = asyncio.ensure_future(care.run())
        await finished(aged.wait())
        running.cancel()

    asyncio.run(until_they_age())
