"""Run the tests that a change can affect: `--changed BASE` compares the work tree with BASE.

A test file reaches the modules that it imports, and the imports of these modules. A test with
processes also reaches the modules that strings name, because tests start processes by name. A
package below `tests/support` counts as one module, because tests run its scripts by path. A changed
file that is not a module affects the test files whose reach names it. A changed build file affects
all tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from repository import ROOT

from suite import durations

EVERYTHING = (
    "pyproject.toml",
    "Makefile",
    "constraints",
    "tests/conftest.py",
    "tests/support/suite",
)
UNIT = "tests/unit/"  # in this folder only tests with PROCESS start a process
PROCESS = "pytest.mark.process"
_NAMED = re.compile(r"\brekindle(?:\.\w+)+\.?")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", metavar="BASE", help="run what the changes since BASE can affect")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    base = config.getoption("--changed")
    if base is None:
        return
    chosen = affected(Tree.read(ROOT), changed_files(base))
    kept = [item for item in items if durations.file_of(item.nodeid) in chosen]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def changed_files(base: str) -> list[str]:
    """Return the paths that differ from a commit, including untracked files."""
    names = []
    for command in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        found = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        names += found.stdout.splitlines()
    return names


class Tree:
    """The Python files of a checkout: the text of each unit, and the units that it needs.

    A unit is a module of the package (its dotted name), a package of `tests/support` (its folder),
    or a test file (its path). A `conftest.py` belongs to all test files of its folder and of
    folders below.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts: dict[str, str] = {}
        for path, text in texts.items():
            unit = unit_of(path)
            self.texts[unit] = self.texts.get(unit, "") + text + "\n"
        self._imports: dict[str, set[str]] = {unit: set() for unit in self.texts}
        self._names: dict[str, set[str]] = {unit: set() for unit in self.texts}
        for path, text in texts.items():
            unit, nodes = unit_of(path), list(ast.walk(ast.parse(text)))
            self._imports[unit] |= self._units(_imported(nodes))
            self._names[unit] |= self._units(_named(nodes))

    @classmethod
    def read(cls, root: Path) -> Tree:
        """Read the package and the tests."""
        paths = [*root.glob("rekindle/**/*.py"), *root.glob("tests/**/*.py")]
        return cls({str(path.relative_to(root)): path.read_text() for path in paths})

    def reach(self, test: str) -> set[str]:
        """Return all units that a test file needs, and the test file itself."""
        parents = [str(parent) for parent in Path(test).parents]
        pending = [test, *(f"{parent}/conftest.py" for parent in parents)]
        starts = not test.startswith(UNIT) or PROCESS in self.texts.get(test, "")
        reached: set[str] = set()
        while pending:
            unit = pending.pop()
            if unit in self._imports and unit not in reached:
                reached.add(unit)
                pending += self._imports[unit]
                if starts:  # a started process imports the modules that the test names
                    pending += self._names[unit]
        return reached

    def _units(self, names: Iterable[str]) -> set[str]:
        return {unit for name in names for unit in self._prefixes(name)}

    def _prefixes(self, name: str) -> Iterable[str]:
        if name.endswith("."):  # the program completes the name when it runs
            return [unit for unit in self.texts if unit.startswith(name)]
        parts = name.split(".")
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return [unit for unit in (*prefixes, f"tests/support/{parts[0]}") if unit in self.texts]


def _imported(nodes: Iterable[ast.AST]) -> Iterable[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _named(nodes: Iterable[ast.AST]) -> Iterable[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _NAMED.findall(node.value)


def unit_of(path: str) -> str:
    """Return the unit of a Python file."""
    parts = Path(path).with_suffix("").parts
    if parts[:2] == ("tests", "support"):
        return "/".join(parts[:3])
    if parts[0] == "rekindle":
        return ".".join(parts).removesuffix(".__init__")
    return path


def affected(tree: Tree, changed: Iterable[str]) -> set[str]:
    """Return the test files that the changed paths can affect."""
    changed = list(changed)
    tests = [unit for unit in tree.texts if Path(unit).name.startswith("test_")]
    if any(path.startswith(EVERYTHING) for path in changed):
        return set(tests)
    units = {unit_of(path) for path in changed if path.endswith(".py")}
    files = [path for path in changed if unit_of(path) not in tree.texts]
    words = {word for path in files for word in (Path(path).name, f'"{Path(path).parts[0]}"')}
    found = set()
    for test in tests:
        reached = tree.reach(test)
        if reached & units or _mentions(tree, reached, words):
            found.add(test)
    return found


def _mentions(tree: Tree, reached: Iterable[str], words: Iterable[str]) -> bool:
    tests = [unit for unit in reached if unit.startswith("tests/")]
    return any(word in tree.texts[unit] for unit in tests for word in words)
