"""Arguments of the Sessions, from their signatures and docstrings."""

from __future__ import annotations

import inspect
from typing import Any

from docstrings import explained

from reference_tables.markdown import check_names, code, page, sentence, table
from rekindle.training.torch import Session

_UNITS = {"timeout_s": "seconds", "total": "steps"}
_HEADS = ("Argument", "Type", "Unit", "Default", "Meaning")


def session() -> str:
    """Return the page of Session arguments. Raises ValueError: a docstring lacks an argument."""
    return page(
        "Session arguments",
        "[The Session in a training script](../train/session.md) shows how to use them. The "
        "[API](api/torch.md) has the methods.",
        "## Session of rekindle.training.torch",
        "All arguments are given by name.",
        _arguments(Session.__init__, Session.__doc__),
        "### Session.steps",
        _arguments(Session.steps, Session.steps.__doc__),
        "### Session.phase",
        _arguments(Session.phase, Session.phase.__doc__),
    )


def _arguments(function: Any, docstring: str | None) -> str:
    known = explained(docstring)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    names = [parameter.name for parameter in parameters]
    check_names("session", names, [name for name in known if name in names])
    rows = []
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else code(parameter.default)
        unit = _UNITS.get(parameter.name, "")
        kind = code(parameter.annotation)
        rows.append((code(parameter.name), kind, unit, default, sentence(known[parameter.name])))
    return table(_HEADS, rows)
