"""The tests that a change can affect, in small source trees."""

from __future__ import annotations

import pytest
from suite.changed import Tree, affected, unit_of

FILES = {
    "rekindle/__init__.py": "",
    "rekindle/low.py": "import os",
    "rekindle/high.py": "from rekindle.low import thing",
    "rekindle/cli/main.py": "def main(): from rekindle.high import more",
    "rekindle/agent/process.py": "",
    "tests/support/jobs/__init__.py": 'MODULE = "rekindle.agent.process"',
    "tests/support/jobs/script.py": "from rekindle.high import more",
    "tests/support/waiting.py": "",
    "tests/unit/conftest.py": "import waiting",
    "tests/unit/test_low.py": "from rekindle import low",
    "tests/unit/test_names.py": 'assert name == "rekindle.high"',
    "tests/unit/test_own.py": 'pytestmark = pytest.mark.process\nstart("-m", "rekindle.cli.main")',
    "tests/integration/test_run.py": 'start("-m", "rekindle.cli.main")',
    "tests/integration/test_jobs.py": "import jobs\nassert 'page.html'",
    "tests/integration/test_any.py": 'start(f"rekindle.agent.{module}")\nread("docs")',
}
ALL = {path for path in FILES if "/test_" in path}


@pytest.fixture(scope="module")
def tree() -> Tree:
    """Return a tree of these files."""
    return Tree(FILES)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        # Tests that import the module, also indirectly. The package's `__init__` has no imports.
        ("rekindle/low.py", {"test_low", "test_own", "test_run", "test_jobs"}),
        ("rekindle/high.py", {"test_own", "test_run", "test_jobs"}),
        # A test starts a process by its module name. Unit tests without a mark start none.
        ("rekindle/cli/main.py", {"test_own", "test_run"}),
        # An incomplete name in an f-string stands for all modules of a package.
        ("rekindle/agent/process.py", {"test_jobs", "test_any"}),
        # A package of helpers is one unit.
        ("tests/support/jobs/script.py", {"test_jobs"}),
        # A `conftest.py` belongs to all tests of its folder.
        ("tests/support/waiting.py", {"test_low", "test_names", "test_own"}),
        ("tests/unit/conftest.py", {"test_low", "test_names", "test_own"}),
        ("tests/unit/test_low.py", {"test_low"}),
        # Other files affect the tests that name them, or their folder.
        ("page.html", {"test_jobs"}),
        ("docs/any.md", {"test_any"}),
        ("README.md", set()),
    ],
)
def test_a_change_selects_the_tests_that_it_can_affect(
    tree: Tree, changed: str, tests: set[str]
) -> None:
    """affected() follows imports, names of modules, and names of files."""
    found = affected(tree, [changed])
    assert {path.rpartition("/")[2].removesuffix(".py") for path in found} == tests


@pytest.mark.parametrize("changed", ["pyproject.toml", "Makefile", "tests/support/suite/rerun.py"])
def test_build_files_affect_all_tests(tree: Tree, changed: str) -> None:
    """A changed build file selects all tests, also together with other files."""
    assert affected(tree, ["README.md", changed]) == ALL


def test_several_changes_add_up(tree: Tree) -> None:
    """Several changed files select the tests of each file."""
    one, other = ["rekindle/cli/main.py"], ["tests/unit/test_low.py"]
    assert affected(tree, one + other) == affected(tree, one) | affected(tree, other)
    assert affected(tree, []) == set()


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("rekindle/training/torch/__init__.py", "rekindle.training.torch"),
        ("rekindle/cli/main.py", "rekindle.cli.main"),
        ("tests/support/jobs/driver.py", "tests/support/jobs"),
        ("tests/support/waiting.py", "tests/support/waiting"),
        ("tests/unit/agent/test_lateness.py", "tests/unit/agent/test_lateness.py"),
    ],
)
def test_the_unit_of_a_file(path: str, unit: str) -> None:
    """The unit of a file is a module, a package of helpers, or a test file."""
    assert unit_of(path) == unit
