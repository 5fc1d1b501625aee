"""MindCluster's switch in a pod: what agents tell of it, and when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rekindle.profiling.switch import FIELDS, Switch, switch_of
from rekindle.runtime.protocol import Message, Traced
from rekindle.runtime.record_care import RecordCare

ALL = switch_of(("communication",))


def text(**on: bool) -> str:
    return json.dumps({name: "on" if on.get(name) else "off" for name in FIELDS})


@pytest.fixture
def told() -> list[Message]:
    return []


@pytest.fixture
def care(tmp_path: Path, told: list[Message]) -> RecordCare:
    return RecordCare(tmp_path, lambda: (0,), told.append, lambda: None, tmp_path / "switch")


def test_what_is_new_is_told_once(care: RecordCare, told: list[Message], tmp_path: Path) -> None:
    """A switch that is off from the start says nothing, nor does one that is not there."""
    care.look()
    (tmp_path / "switch").write_text(text())
    care.look()
    assert not told
    (tmp_path / "switch").write_text(text(Step=True))
    care.look()
    care.look()
    (tmp_path / "switch").write_text(text(CommunicationOperator=True))
    care.look()
    (tmp_path / "switch").write_text(text())
    care.look()
    assert told == [
        Traced(switch=switch_of(("step",))),
        Traced(switch=ALL),
        Traced(switch=Switch()),
    ]


def test_a_switch_that_a_mount_exchanges(
    care: RecordCare, told: list[Message], tmp_path: Path
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
    assert told == [Traced(switch=switch_of(("step",))), Traced(switch=Switch())]


@pytest.mark.parametrize("wrong", ["", "{", "[]", '{"Step": 1}', "\x00"])
def test_a_switch_that_is_not_understood(
    wrong: str,
    care: RecordCare,
    told: list[Message],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is said once, and what held before holds."""
    (tmp_path / "switch").write_text(wrong)
    care.look()
    care.look()
    assert not told
    assert capsys.readouterr().err.count("is not understood") == 1
