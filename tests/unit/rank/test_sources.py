"""The digests of the files of a script's own code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rekindle.rank import sources


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_read", {})
    monkeypatch.setattr(sources, "_skipped", set())
    monkeypatch.setattr(sources, "MOST_BYTES", 1 << 30)  # this process has modules of many tests
    sources.digests.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_the_digests_fit_into_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script is first. Files beyond the limit, and paths that are not UTF-8, are left out."""
    monkeypatch.setattr(sources, "MOST_BYTES", 5 * (len(str(tmp_path)) + 30))
    for name in ("train.py", "\udcff.py", *(f"{number}.py" for number in range(9))):
        (tmp_path / name).write_text("")
        sources.note(str(tmp_path / name))
    names = [Path(path).name for path in sources.digests()]
    assert names[0] == "train.py"
    assert 1 < len(names) < 9
    assert "\udcff.py" not in names


class Impostor:
    """An object that says it is a module, as a library of cffi does."""

    __class__ = ModuleType


@pytest.mark.usefixtures("_fresh")
def test_an_object_that_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.modules` may hold any object."""
    monkeypatch.setitem(sys.modules, "ours_impostor", Impostor())
    monkeypatch.setitem(sys.modules, "ours_nothing", None)
    assert isinstance(sys.modules["ours_impostor"], ModuleType)
    sources.digests()


@pytest.mark.usefixtures("_fresh")
def test_own_files_have_digests_of_the_text_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules outside of the installed packages count, with their text at the first arrival.

    Modules that are loaded later do not count.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ours_now", "ours_later"):
        (tmp_path / f"{name}.py").write_text("A = 1\n")
    script = tmp_path / "ours_script.py"
    script.write_text("print(1)\n")
    sources.note(str(script))
    script.write_text("print(2)\n")  # changed while the script runs
    importlib.import_module("ours_now")
    found = sources.digests()
    own = {Path(path).name: digest for path, digest in found.items()}
    assert own.keys() >= {"ours_script.py", "ours_now.py"}
    assert "ours_later.py" not in own
    assert not [path for path in found if "site-packages" in path or "/rekindle/rank/" in path]
    assert not [path for path in found if path == importlib.__file__]
    importlib.import_module("ours_later")
    (tmp_path / "ours_now.py").write_text("A = 2\n")
    assert sources.digests() == found
    sources.digests.cache_clear()
    monkeypatch.setattr(sources, "_read", {})
    sources.note(str(script))
    changed = {Path(path).name: digest for path, digest in sources.digests().items()}
    assert changed["ours_script.py"] != own["ours_script.py"]
    assert changed["ours_now.py"] != own["ours_now.py"]
    for name in ("ours_now", "ours_later"):
        del sys.modules[name]


@pytest.mark.usefixtures("_fresh")
def test_a_module_that_is_loaded_at_its_first_use_is_not_loaded(tmp_path: Path) -> None:
    """The digests load no module."""
    path = tmp_path / "ours_lazy.py"
    path.write_text("raise AssertionError\n")
    spec = importlib.util.spec_from_file_location("ours_lazy", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ours_lazy"] = module
    try:
        spec.loader.exec_module(module)
        sources.digests()
    finally:
        del sys.modules["ours_lazy"]


@pytest.mark.usefixtures("_fresh")
def test_a_file_that_does_not_exist_has_no_digest(tmp_path: Path) -> None:
    """A module from an archive, or one whose file was removed, does not count."""
    sources.note(str(tmp_path / "archive.zip" / "module.py"))
    assert not [path for path in sources.digests() if "archive.zip" in path]


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("removed", [False, True])
def test_modules_of_the_fork_server_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Only later modules count, also if the script removes an earlier one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["ours_first", "ours_second", "ours_third", "ours_fourth"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    for name in names[:2]:
        importlib.import_module(name)
    sources.skip_loaded()
    for name in names[2:]:
        importlib.import_module(name)
    if removed:
        del sys.modules[names[0]]
    try:
        assert [Path(path).stem for path in sources.digests()] == names[2:]
    finally:
        for name in names[removed:]:
            del sys.modules[name]
