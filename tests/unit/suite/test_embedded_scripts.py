"""Scripts that tests run in other processes import names that exist."""

from __future__ import annotations

import ast
import importlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

ELSEWHERE = ("test_changed.py", "test_embedded_scripts.py")  # their scripts import other packages


def scripts(path: Path) -> Iterator[tuple[int, ast.Module]]:
    """Yield the Python scripts in the strings of a file, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else ""
        if isinstance(text, str) and "import" in text and "\n" in text:
            try:
                yield node.lineno, ast.parse(textwrap.dedent(text))
            except SyntaxError:
                continue  # plain text, or a part of a script


def found(module: str, name: str) -> Any:
    """Return the result of `from module import name`. Raises ImportError: it does not exist."""
    holder = importlib.import_module(module)
    if hasattr(holder, name):
        return getattr(holder, name)
    return importlib.import_module(f"{module}.{name}")


def problems(script: ast.Module) -> list[str]:
    """List the names of Rekindle that a script uses and that do not exist."""
    known, missing = {}, []
    for node in ast.walk(script):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rekindle":
            for each in node.names:
                try:
                    known[each.asname or each.name] = found(str(node.module), each.name)
                except ModuleNotFoundError as error:
                    if str(error.name).startswith("rekindle"):
                        missing.append(f"{node.module} has no {each.name}")
    for node in ast.walk(script):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            held = known.get(node.value.id, ...)
            if held is not ... and not hasattr(held, node.attr):
                missing.append(f"{node.value.id} has no {node.attr}")
    return missing


@pytest.mark.process  # one of the imported modules opens a port
def test_their_imports_are_there() -> None:
    paths = [each for each in (ROOT / "tests").rglob("*.py") if each.name not in ELSEWHERE]
    paths += (ROOT / "benchmarks").glob("*.py")
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in paths
        for line, script in scripts(path)
        for problem in problems(script)
    ]
    assert wrong == []


def test_a_wrong_import_is_found() -> None:
    script = ast.parse("from rekindle.errors import Gone, UsageError\nprint(UsageError.gone)\n")
    assert problems(script) == ["rekindle.errors has no Gone", "UsageError has no gone"]
