"""Arguments of the Sessions, from their source: signatures and docstrings."""

from __future__ import annotations

import ast

from docstrings import explained
from repository import ROOT

from reference_tables.markdown import check_names, code, page, sentence, table

_UNITS = {"epoch": "epochs", "timeout_s": "seconds", "total": "steps"}
_HEADS = ("Argument", "Type", "Unit", "Default", "Meaning")


def session() -> str:
    """Return the page of Session arguments. Raises ValueError: a docstring lacks an argument."""
    torch, mindspore = _session_in("torch"), _session_in("mindspore")
    return page(
        "Session arguments",
        "[The Session in a training script](../train/session.md) shows how to use them. The API "
        "has the methods, [for PyTorch](api/torch.md) and [for MindSpore](api/mindspore.md).",
        "## Session of rekindle.training.torch",
        "All arguments are given by name.",
        _arguments(torch, "__init__"),
        "### steps",
        _arguments(torch, "steps"),
        "### phase",
        _arguments(torch, "phase"),
        "## Session of rekindle.training.mindspore",
        _arguments(mindspore, "__init__"),
        "### train",
        _arguments(mindspore, "train"),
        "### phase",
        _arguments(mindspore, "phase"),
    )


def _session_in(framework: str) -> ast.ClassDef:
    """Return the class of a framework from its source: MindSpore is not installed here."""
    path = ROOT / "rekindle" / "training" / framework / "session.py"
    body = ast.parse(path.read_text()).body
    return next(n for n in body if isinstance(n, ast.ClassDef) and n.name == "Session")


def _arguments(session: ast.ClassDef, method: str) -> str:
    function = next(n for n in session.body if isinstance(n, ast.FunctionDef) and n.name == method)
    known = explained(ast.get_docstring(session if method == "__init__" else function))
    found = function.args
    defaults = [*[None] * (len(found.args) - len(found.defaults)), *found.defaults]
    every = [*zip(found.args, defaults, strict=True)][1:]
    every += zip(found.kwonlyargs, found.kw_defaults, strict=True)
    names = [argument.arg for argument, _ in every]
    check_names("session", names, [name for name in known if name in names])
    return table(
        _HEADS,
        [
            (
                code(argument.arg),
                code(ast.unparse(argument.annotation)) if argument.annotation else "",
                _UNITS.get(argument.arg, ""),
                code(ast.unparse(default)) if default else "required",
                sentence(known[argument.arg]),
            )
            for argument, default in every
        ],
    )
