"""docs/architecture.md against the source: its picture, its folders, and the names in it."""

import re

import pytest
from architecture.hops import hops_of
from architecture.picture import (
    PACKAGE,
    PAGE,
    folders_in_order,
    graph_of_folders,
    reachable,
    with_picture,
    without_detours,
)
from repository import ROOT
from traced.fault import lines_of

TEXT = PAGE.read_text()
FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|toml|md))`")


def test_the_picture_is_that_of_the_imports() -> None:
    """The page has the picture that the command draws now."""
    command = "PYTHONPATH=tests/support python -m architecture.picture"
    assert with_picture(TEXT) == TEXT, f"docs/architecture.md is old: run {command}"


def test_the_picture_hides_no_import() -> None:
    """Arrows that are left out are implied by paths of arrows."""
    graph = graph_of_folders()
    drawn = without_detours(graph)
    assert all(reachable(drawn, folder) == reachable(graph, folder) for folder in graph)


def test_each_folder_has_its_row() -> None:
    """The table has each folder of the package, in the order of the import contract."""
    section = TEXT.partition("| folder | runs in |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.M)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(rows) == folders == set(folders_in_order())


@pytest.mark.parametrize("name", sorted(set(FILE.findall(TEXT))))
def test_each_file_exists(name: str) -> None:
    """A file that the page names is in the repository, or in the package."""
    assert (ROOT / name).is_file() or (PACKAGE / name).is_file() or "NAME" in name


def test_there_are_twelve_hops() -> None:
    """Each hop comes after earlier ones, and its functions exist."""
    hops = hops_of(TEXT)
    assert [hop.number for hop in hops] == list(range(1, 13))
    for hop in hops:
        assert all(before < hop.number for before in hop.after)
        assert hop.functions
        assert all(lines_of(file, name) for file, name in hop.functions)
