"""The tree of errors."""

from __future__ import annotations

import ast
import re

from repository import ROOT

from rekindle import errors

# Control flow: inside one module, or through the handlers of a framework or of the script.
NO_ERRORS = {"Rewind", "_Unknown"}


def declared() -> dict[str, str]:
    """Return the base of each exception class of the package."""
    found = {}
    for path in (ROOT / "rekindle").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name, bases=[ast.Name(id=base)]) if re.search(
                    r"(Error|Exception)$", base
                ):
                    assert name not in found, f"{name} is declared twice"
                    found[name] = base
    return found


def drawn() -> dict[str, str]:
    """Return the base of each class in the tree of the module's docstring."""
    found, above = {}, ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        if node := re.match(r"    ([│├└─ ]*)(\w+Error)\b", line):
            depth = len(node[1]) // 4 + 1
            found[node[2]] = above[depth - 1]
            above[depth:] = [node[2]]
    return found


def test_the_drawn_tree_has_every_error() -> None:
    """The drawn tree has each error below its base."""
    classes = declared()
    tree = {"Exception"}
    for _ in classes:
        tree |= {name for name, base in classes.items() if base in tree}
    assert drawn() == {name: base for name, base in classes.items() if name in tree - NO_ERRORS}


def test_no_error_is_outside_of_the_tree() -> None:
    """Only RekindleError has the base Exception."""
    bases = declared()
    assert {name for name in bases if bases[name] == "Exception"} - NO_ERRORS == {"RekindleError"}
