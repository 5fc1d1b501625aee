"""Count the statements of Python files, without imports, docstrings and `__all__`.

`python tests/support/statements.py FOLDER...` prints the statements and the files of each folder.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def statements(text: str) -> int:
    """Return the number of statements of a module's text."""
    return sum(map(_counts, ast.walk(ast.parse(text))))


def _counts(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom():
            return False
        case ast.Expr(value=ast.Constant(value=str())):
            return False
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return False
    return isinstance(node, ast.stmt)


def main() -> None:
    for folder in sys.argv[1:]:
        files = sorted(Path(folder).rglob("*.py"))
        total = sum(statements(file.read_text()) for file in files)
        sys.stdout.write(f"{folder}: {total} statements in {len(files)} files\n")


if __name__ == "__main__":
    main()
