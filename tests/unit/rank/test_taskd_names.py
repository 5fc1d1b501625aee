"""TaskD's names in a rank: an installed TaskD stays, and wrong arguments are refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.rank import taskd_names


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the names for one test."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(taskd_names, "_begun", set())
    monkeypatch.setenv("RANK", "0")
    taskd_names.install()
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "taskd"]:
        del sys.modules[name]


def test_modules_of_an_installed_taskd_are_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old TaskD without a module stays without it."""
    (tmp_path / "taskd").mkdir()
    (tmp_path / "taskd" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("taskd").__file__ == str(tmp_path / "taskd" / "__init__.py")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("taskd.api")


def test_other_modules_do_not_exist() -> None:
    """Only the names of the page exist, so a script can ask for others."""
    api = importlib.import_module("taskd.api")
    assert api.start_taskd_worker is taskd_names.start_taskd_worker
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("taskd.api.taskd_agent_api")
    with pytest.raises(ImportError):
        importlib.import_module("taskd.cython_api")


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (5000, ""),
        (0, "REKINDLE_PROFILING_CAP_MB=0"),
        (-1, "give a whole number of megabytes"),
        ("5 GB", "give a whole number of megabytes"),
    ],
)
def test_limits(limit: object, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A number is accepted, and a line says what sets the limit; other values are refused."""
    accepted = taskd_names.init_taskd_worker(0, limit)  # type: ignore[arg-type]
    assert accepted is ("give a whole" not in text)
    assert taskd_names.start_taskd_worker() is accepted
    assert text in capfd.readouterr().err


def test_the_size_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Numbers that the caller leaves out are not compared."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert not taskd_names.start_taskd_manager()
    assert not taskd_names.init_taskd_manager({"node_nums": 2, "proc_per_node": 4})
    assert "proc_per_node 4, and this job has 8" in capfd.readouterr().err
    assert taskd_names.init_taskd_manager({"job_id": "x", "node_nums": "2"})
    assert taskd_names.start_taskd_manager()
