"""Docstrings and comments of the package name existing modules, attributes and files."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

PACKAGE = ROOT / "rekindle"
FOLDERS = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())
# Variables also have these names, for example in `rank.finished`.
ALSO_VARIABLES = {"job", "rank"}

DOTTED = re.compile(rf"(?<![\w./-])(?:rekindle|{'|'.join(FOLDERS)})(?:\.\w+)+(?!\.?\w|/)")
FILE = re.compile(r"(?<![\w./-])(?:\w+/)*\w+\.(?:py|toml|md|proto)\b")


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and docstrings, and their texts."""
    text = path.read_text()
    if path.suffix == ".toml":
        for number, line in enumerate(text.splitlines(), start=1):
            yield number, line.partition("#")[2]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring


@functools.cache
def defined(path: Path) -> dict[str, ast.stmt]:
    """Return the names that a module defines or imports, at its first level or in `if` blocks."""
    return dict(_names(ast.parse(path.read_text()).body))


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Assign(targets=targets):
                yield from ((each.id, node) for each in targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name, node) for alias in names)
            case ast.If(body=inner):
                yield from _names(inner)


def exists(dotted: str) -> bool:
    """Return whether this is a module of the package, a name in it, or a member of its class."""
    parts = dotted.removeprefix("rekindle.").split(".")
    place = PACKAGE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        module = place / f"{parts.pop(0)}.py"
    else:
        module = place / "__init__.py"
    if not parts:
        return module.is_file()
    node = defined(module).get(parts[0]) if module.is_file() else None
    if isinstance(node, ast.ClassDef) and len(parts) > 1:
        return parts[1] in dict(_names(node.body))
    return node is not None


def is_ours(file: str) -> bool:
    """Return whether a path has the form of a path of this repository."""
    first, slash, _ = file.partition("/")
    if not slash:
        return file.endswith(".toml")
    return (PACKAGE / first).is_dir() or (ROOT / first).is_dir()


def wrong(path: Path) -> Iterator[str]:
    """Yield each name in the comments of a file that does not exist, with its line."""
    for line, text in comments(path):
        files = set(FILE.findall(text))
        for name in set(DOTTED.findall(text)) - files:
            first, *others = name.split(".")
            if not exists(name) and not (first in ALSO_VARIABLES and len(others) == 1):
                yield f"{path.relative_to(ROOT)}:{line}: {name}"
        for name in filter(is_ours, files):
            if not found(name):
                yield f"{path.relative_to(ROOT)}:{line}: {name}"


def found(file: str) -> bool:
    """Return whether such a file exists below the root, the package or one of its folders."""
    return (ROOT / file).is_file() or next(PACKAGE.rglob(file), None) is not None


def test_names_in_comments_exist() -> None:
    """Comments do not name a module or a file that a change moved or removed."""
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml")]
    assert len(files) > 100
    assert sorted(each for path in files for each in wrong(path)) == []
