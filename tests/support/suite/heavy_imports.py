"""Find the test files of `tests/unit` whose collection imports a slow library.

Such an import takes up to seconds, in each test worker. The search reads the sources: it follows
the imports at the level of modules, through the package and `tests/support`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from repository import ROOT

HEAVY = frozenset({"boto3", "botocore", "kubernetes", "matplotlib", "prefect", "urllib3"})


def heavy_imports() -> dict[str, set[str]]:
    """Return the slow libraries that each test file imports, by its path below `tests/unit`."""
    files = _files()
    imports = {name: _imports(path) for name, path in files.items()}
    unit = ROOT / "tests" / "unit"
    found = {}
    for path in sorted(unit.rglob("test_*.py")):
        parents = (each / "conftest.py" for each in path.parents)
        starts = [path, *(each for each in parents if each.exists())]
        heavy = _reached(frozenset().union(*map(_imports, starts)), imports) & HEAVY
        if heavy:
            found[str(path.relative_to(unit))] = heavy
    return found


def _files() -> dict[str, Path]:
    """Return the file of each module that a test can import, by the module's name."""
    found = {}
    for root, folder in ((ROOT, ROOT / "rekindle"), (ROOT / "tests" / "support",) * 2):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _reached(names: frozenset[str], imports: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the modules that an import of these names loads, and the libraries' names."""
    reached: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imports.get(name, ())
    return reached


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the names that the import of a file loads, with the packages that contain them."""
    found: set[str] = set()
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            found |= {".".join(parts[: count + 1]) for count in range(len(parts))}
    return frozenset(found)


def _executed(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run with the module: not those of functions and of a type checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from (each for part in child.orelse for each in _executed(part))
        else:
            yield from _executed(child)
