"""Each promise of docs/reference/promises.md names tests that exist."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from repository import ROOT

PAGE = ROOT / "docs" / "reference" / "promises.md"
NAMED = sorted(
    set(re.findall(r"`((?:unit|integration|contract)/[\w/]+\.py)::(\w+)`", PAGE.read_text()))
)


@functools.cache
def functions(path: str) -> set[str]:
    """Return the names of the functions of a test file."""
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 100


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path: str, name: str) -> None:
    assert name in functions(path)
