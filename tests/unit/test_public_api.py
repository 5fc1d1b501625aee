"""The names that documentation and scripts import."""

from __future__ import annotations

import ast
import pydoc
import re
import subprocess
import sys

import pytest
from repository import ROOT

import rekindle
from rekindle.training.torch import Session

PUBLIC = ("rekindle", "rekindle.training.torch", "rekindle.training.mindspore")
PUBLIC += ("rekindle.training", "rekindle.testing")


@pytest.mark.parametrize("name", rekindle.__all__)
def test_every_name_is_there(name: str) -> None:
    """Each public name exists and has a docstring."""
    assert getattr(rekindle, name).__doc__
    assert name in dir(rekindle)


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = rekindle.Trainer


@pytest.mark.process
def test_the_package_imports_nothing_by_itself() -> None:
    """The import of the package does not import its modules, because every rank imports it."""
    script = "import sys, rekindle; print([n for n in sys.modules if n.startswith('rekindle.')])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


@pytest.mark.process
def test_a_client_needs_no_signal_of_linux() -> None:
    """A client on another system, which has no real-time signals, imports commands and flows."""
    script = (
        "import signal; del signal.SIGRTMIN, signal.SIGRTMAX;"
        "import rekindle.cli.main, rekindle.engines.local, rekindle.job.spec;"
        "import rekindle.flows.retrain, rekindle.flows.train"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_says_where_to_start() -> None:
    text = pydoc.plain(pydoc.render_doc(rekindle))
    for words in ("training script", "Prefect flow", "rekindle run", *rekindle.__all__):
        assert words in text


def test_help_of_a_session_shows_what_a_script_uses() -> None:
    """The public names of a Session are the names that a script uses, and no others."""
    shown = {name for name in vars(Session) if not name.startswith("_")}
    place = {"rank", "world_size", "slot", "full_world", "generation", "finished"}
    loop = {"steps", "epochs", "batches", "step", "run"}
    assert shown == place | loop | {"model", "device", "phase", "first_start"}


def private_imports(source: str) -> list[str]:
    """Return the modules of Rekindle that this program imports and that are not public."""
    modules = [
        str(node.module) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
    ]
    return [each for each in modules if each.startswith("rekindle") and each not in PUBLIC]


def test_documentation_imports_from_public_paths() -> None:
    """All code blocks of the README and of docs import from public modules."""
    wrong = {
        page.name: private
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        if (private := private_imports(block))
    }
    assert wrong == {}


def test_examples_import_from_public_paths() -> None:
    """All examples import from public modules, except the demo, which draws pictures of a job."""
    examples = [
        path
        for path in (ROOT / "examples").rglob("*.py")
        if ROOT / "examples" / "demo" not in path.parents
    ]
    assert examples
    assert [path.name for path in examples if private_imports(path.read_text())] == []
