"""docs/architecture.md agrees with the source: its picture, its folders, and its names."""

import re

import pytest
from architecture.hops import hops_of
from architecture.picture import (
    PACKAGE,
    PAGE,
    graph_of_folders,
    layers_of_folders,
    reachable,
    with_picture,
    without_detours,
)
from repository import ROOT
from traced.fault import lines_of

from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal

TEXT = PAGE.read_text()
FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|toml|md))`")


def test_the_picture_is_that_of_the_imports() -> None:
    """The picture on the page is equal to the picture that the command draws."""
    command = "PYTHONPATH=tests/support python -m architecture.picture"
    assert with_picture(TEXT) == TEXT, f"docs/architecture.md is old: run {command}"


def test_the_picture_hides_no_import() -> None:
    """A path of drawn arrows replaces each arrow that the picture leaves out."""
    graph = graph_of_folders()
    drawn = without_detours(graph)
    assert all(reachable(drawn, folder) == reachable(graph, folder) for folder in graph)


def test_each_folder_has_its_row() -> None:
    """The table has each folder of the package with its layer, in the order of the contract."""
    section = TEXT.partition("| folder | layer |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", section, re.M)
    layers = [layer for layer in layers_of_folders() if layer]
    wanted = [(name, number) for number, layer in enumerate(layers, start=1) for name in layer]
    assert sorted((int(number), name) for name, number in rows) == sorted(
        (number, name) for name, number in wanted
    )
    assert {name for name, _ in rows} == {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }


@pytest.mark.parametrize("name", sorted(set(FILE.findall(TEXT))))
def test_each_file_exists(name: str) -> None:
    """A file that the page names is in the repository, or in the package."""
    assert (ROOT / name).is_file() or (PACKAGE / name).is_file() or "NAME" in name


def test_there_are_twelve_hops() -> None:
    """Each hop follows earlier hops, and its functions, messages and events exist."""
    hops = hops_of(TEXT)
    assert [hop.number for hop in hops] == list(range(1, 13))
    for hop in hops:
        assert all(before < hop.number for before in hop.after)
        assert hop.functions
        assert all(lines_of(file, name) for file, name in hop.functions)
        assert all(issubclass(getattr(p, name), p.Message) for name in hop.messages)
        assert all(issubclass(getattr(journal, name), journal.Event) for name in hop.events)
