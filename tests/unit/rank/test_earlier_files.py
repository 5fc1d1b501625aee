"""Files that start-up code destroys when a new process runs it again."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rekindle.rank.earlier_files import EarlierFiles

_OLD = 1_000_000_000  # a time before this process
_current: EarlierFiles | None = None  # Python cannot remove an audit hook


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _current is not None:
        _current.on_event(event, args)


sys.addaudithook(_hook)


@contextmanager
def _start_up() -> Iterator[list[str]]:
    """Run the block as the start-up code of a script that uses rekindle; yield the lines."""
    global _current
    lines: list[str] = []
    _current = EarlierFiles(lines.append)
    try:
        yield lines
    finally:
        _current.end()
        _current = None


def _written(path: Path, content: str, at: float = _OLD) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    os.utime(path, (at, at))
    return path


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_destroyed_stays_under_another_name(tmp_path: Path) -> None:
    """A log that is emptied, a file and a folder that are removed: each has a line and a copy."""
    log, model = _written(tmp_path / "log", "10 steps"), _written(tmp_path / "model", "weights")
    inside = _written(tmp_path / "outputs" / "best", "the best")
    with _start_up() as lines:
        with open("log", "w") as file:
            file.write("header")
        model.unlink()
        shutil.rmtree(inside.parent)
    assert log.read_text() == "header"
    assert not model.exists()
    assert not inside.parent.exists()
    folder = tmp_path / ".rekindle-earlier"
    kept = {path: (folder / path).read_text() for path in ("log.before-1", "model.before-1")}
    assert kept == {"log.before-1": "10 steps", "model.before-1": "weights"}
    assert (folder / "outputs.before-1" / "best").read_text() == "the best"
    assert [line.split()[1] for line in lines] == ["empties", "removes", "removes"]
    assert all(line.startswith(f"{__file__}:") and "FIRST_START" in line for line in lines)


def test_settings_that_are_written_again_are_no_loss(tmp_path: Path) -> None:
    """A file with the same content has no copy and no line."""
    settings = _written(tmp_path / "settings.json", "{}")
    with _start_up() as lines:
        settings.write_text("{}")
    assert lines == []
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_harmless_calls(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """New files, empty ones, caches of tools and temporary folders elsewhere are left alone."""
    empty = _written(tmp_path / "lock", "")
    cache = _written(tmp_path / ".cache" / "font", "x")
    elsewhere = _written(tmp_path_factory.mktemp("temporary") / "x", "x")
    added = _written(tmp_path / "added", "1")
    with _start_up() as lines:
        (tmp_path / "new").write_text("1")
        for path in (empty, cache, elsewhere, tmp_path / "new"):
            path.write_text("2")
        with added.open("a") as file:
            file.write("2")
        (tmp_path / "new").unlink()
    assert lines == []
    assert added.read_text() == "12"
    assert not [*tmp_path.rglob("*.before-*")]


def test_a_second_loss_has_another_name(tmp_path: Path) -> None:
    """The copies of earlier processes stay."""
    folder = tmp_path / ".rekindle-earlier"
    folder.mkdir()
    _written(folder / "log.before-1", "first")
    log = _written(tmp_path / "log", "second")
    with _start_up():
        log.write_text("third")
    after = {path.name: path.read_text() for path in folder.iterdir()}
    assert (log.read_text(), after) == (
        "third",
        {"log.before-1": "first", "log.before-2": "second"},
    )


def test_after_the_end_nothing_is_kept(tmp_path: Path) -> None:
    """A script in its Session may replace its own files."""
    log = _written(tmp_path / "log", "x")
    with _start_up() as lines:
        assert _current is not None
        _current.end()
        log.write_text("y")
    assert lines == []
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
