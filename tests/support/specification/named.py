"""The tests that rows name, as their files have them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import NamedTuple

from repository import ROOT


class Named(NamedTuple):
    """A name of a test. act: the act of a job with many faults, or ""."""

    path: str
    name: str
    act: str


def parsed(test: str) -> Named:
    """Return the parts of `file::function` or `file::function[act]`."""
    path, _, name = test.partition("::")
    name, _, act = name.partition("[")
    return Named(path, name, act.removesuffix("]"))


@functools.cache
def functions(path: str) -> Mapping[str, bool]:
    """Return the functions of a test file, and whether each is a soak test; empty: no such file."""
    file = ROOT / "tests" / path
    if not file.is_file():
        return {}
    found = (each for each in ast.walk(ast.parse(file.read_text())))
    return {each.name: _is_soak(each) for each in found if isinstance(each, ast.FunctionDef)}


def is_soak(test: str) -> bool:
    """Return whether only `make soak` runs this test."""
    named = parsed(test)
    return functions(named.path)[named.name]


def _is_soak(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) == "pytest.mark.soak" for each in function.decorator_list)
