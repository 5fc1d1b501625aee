"""MindCluster's switch in a pod: what agents tell of it, and when."""

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
def told() -> list[Message]:
    return []


@pytest.fixture
def care(tmp_path: Path, told: list[Message]) -> ProfilingFiles:
    return ProfilingFiles(tmp_path, lambda: (0,), told.append, lambda: None, tmp_path / "switch")


def test_what_is_new_is_told_once(
    care: ProfilingFiles, told: list[Message], tmp_path: Path
) -> None:
    """One that is not there says nothing."""
    care.look()
    assert not told
    (tmp_path / "switch").write_text(text())
    care.look()
    (tmp_path / "switch").write_text(text(Step=True))
    care.look()
    care.look()
    (tmp_path / "switch").write_text(text(CommunicationOperator=True))
    care.look()
    (tmp_path / "switch").write_text(text())
    care.look()
    assert told == [
        ProfilingSwitchRead(switch=Switch()),
        ProfilingSwitchRead(switch=switch_of(("step",))),
        ProfilingSwitchRead(switch=ALL),
        ProfilingSwitchRead(switch=Switch()),
    ]


def test_a_switch_that_a_mount_exchanges(
    care: ProfilingFiles, told: list[Message], tmp_path: Path
) -> None:
    """Kubernetes puts a link to another folder in its place, and it may be gone in between."""
    for number in range(2):
        (tmp_path / str(number)).write_text(text(Step=not number))
        link = tmp_path / "link"
        link.symlink_to(tmp_path / str(number))
        link.replace(tmp_path / "switch")
        care.look()
        (tmp_path / str(number)).unlink()
        care.look()
    assert told == [
        ProfilingSwitchRead(switch=switch_of(("step",))),
        ProfilingSwitchRead(switch=Switch()),
    ]


@pytest.mark.parametrize("wrong", ["", "{", "[]", '{"Step": 1}', "\x00"])
def test_a_switch_that_is_not_understood(
    wrong: str,
    care: ProfilingFiles,
    told: list[Message],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is said once, and what held before holds."""
    (tmp_path / "switch").write_text(wrong)
    care.look()
    care.look()
    assert not told
    assert capsys.readouterr().err.count("is invalid and has no effect") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("read-only"), "the agent cannot read the profiling records: read-only"),
        (OverflowError("too large"), "a bug in Rekindle: OverflowError('too large')\nTraceback"),
    ],
)
def test_nothing_that_is_spoilt_ends_it(
    error: Exception,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It looks again and again, and says once what it cannot read; of a bug, where it is."""
    monkeypatch.setattr("rekindle.agent.profiling_files._TICK_S", 0.001)
    (tmp_path / "switch").write_bytes(b"\xff")
    asyncio.run(_look_three_times(tmp_path, error))
    shown = capsys.readouterr().err
    assert shown.count("is invalid and has no effect") == 1
    assert shown.count(said) == 1


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
    """Each thing that is cared for goes wrong by itself."""
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
