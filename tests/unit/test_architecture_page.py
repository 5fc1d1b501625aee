"""docs/architecture.md agrees with the source: its picture, its tables, and its names.

The files that docs/extend/new-parts.md names exist.
"""

import re

import pytest
from architecture.hops import hops_of
from architecture.picture import (
    PACKAGE,
    PAGE,
    PROCESSES,
    graph_of_folders,
    layers_of_folders,
    processes_of,
    reachable,
    with_picture,
    without_detours,
)
from jobs.driver import Driver
from repository import ROOT
from traced.fault import lines_of

from rekindle import names
from rekindle.console import Process
from rekindle.protocol import agent as p
from rekindle.recovery.journal import journal

TEXT = PAGE.read_text()
STEPS = (ROOT / "docs" / "extend" / "new-parts.md").read_text()
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


def test_each_folder_has_its_processes() -> None:
    """The column "loaded by" has the processes of the picture; `all` stands for every one."""
    section = TEXT.partition("| folder | layer | loaded by |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| \d+ \| ([^|]+) \|", section, re.M))
    assert {name: processes_in(cell) for name, cell in rows.items()} == {
        name: set(processes) for name, processes in processes_of().items()
    }


def processes_in(cell: str) -> set[str]:
    """Read a list of processes, `all`, or `all except one`."""
    first, _, other = cell.partition(" except ")
    return set(PROCESSES) - {other} if first == "all" else set(cell.split(", "))


def test_each_part_of_the_machine_has_its_row() -> None:
    """The table has the parts of the coordinator's machine in their order, each with its file."""
    section = TEXT.partition("| part | file | work |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)[.]py` \|", section, re.M)
    parts = [(name, part) for name, part in vars(Driver().machine).items() if name[0] != "_"]
    assert rows == [(name, type(part).__module__.rpartition(".")[2]) for name, part in parts]


def test_each_file_of_the_machine_has_its_row() -> None:
    """The tables of the machine's files name all files of its folder except `machine.py`."""
    section = TEXT.partition("| part | file | work |")[2].partition("\n## ")[0]
    tables = section.partition("`recovery.policy.decide.decide")[0]
    files = {path.name for path in (PACKAGE / "coordinator" / "machine").glob("[!_]*.py")}
    assert set(re.findall(r"`(\w+[.]py)`", tables)) == files - {"machine.py"}


def test_each_path_of_the_http_api_has_its_row() -> None:
    """The table has the paths that `rekindle.names` defines."""
    section = TEXT.partition("| path | for |")[2].partition("\n\n")[0]
    first = " ".join(re.findall(r"^\| ([^|]+) \|", section, re.M))
    paths = {value for name, value in vars(names).items() if name.startswith("PATH_")}
    assert set(re.findall(r"/[\w-]+", first)) == paths


def test_each_process_names_itself() -> None:
    """The table of log lines has the prefix of each process. Only one module has the prefixes."""
    for process in Process:
        assert f"| `{process.prefix.strip()}`" in TEXT
    beginning = re.compile(rf"[\"'](\\n)?({'|'.join(process.prefix for process in Process)})")
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "console.py"}:
        assert not beginning.search(path.read_text()), path


@pytest.mark.parametrize("name", sorted(set(FILE.findall(TEXT + STEPS))))
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
