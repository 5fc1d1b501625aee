"""Reads Rekindle's docstrings, and translates them into reStructuredText for Sphinx.

A docstring has sentences, explained names, and code after a blank line:

    Return the result. Raises UsageError: there is none.

    name: its meaning. other, another: the meaning of two names.

A name is explained where `name: ` stands at the start of a sentence.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_NAMES = re.compile(r"(?:^|(?<=[.)?:] ))((?:[a-z_]\w*, )*[a-z_]\w*): ")
_RAISES = re.compile(r"(?<=\. )(?=Raises [A-Z])")


def setup(app: Sphinx) -> dict[str, bool]:
    """Be an extension of Sphinx."""
    app.connect("autodoc-process-docstring", to_rst)
    return {"parallel_read_safe": True}


def explained(docstring: str | None) -> dict[str, str]:
    """Return the meanings of the names that a docstring explains."""
    found: dict[str, str] = {}
    for paragraph in _paragraphs(docstring or ""):
        for names, meaning, _ in _items(paragraph)[1]:
            found |= dict.fromkeys(names.split(", "), meaning)
    return found


def to_rst(
    _app: object, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Replace the lines of a docstring (autodoc-process-docstring)."""
    lines[:] = [
        line
        for paragraph in _paragraphs("\n".join(lines))
        for line in (*_translated(paragraph), "")
    ]


def _paragraphs(docstring: str) -> list[str]:
    return [each for each in re.split(r"\n\s*\n", inspect.cleandoc(docstring)) if each.strip()]


def _items(paragraph: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the text before all names, and of each its names, meaning, and what it raises."""
    text = " ".join(paragraph.split())
    before, *rest = _NAMES.split(text)
    found = []
    for names, words in zip(rest[::2], rest[1::2], strict=True):
        meaning, *raises = _RAISES.split(words.strip(), maxsplit=1)
        found.append((names, meaning.strip(), "".join(raises)))
    return before.strip(), found


def _translated(paragraph: str) -> list[str]:
    lines = paragraph.splitlines()
    if all(line.startswith("    ") for line in lines):
        return ["::", "", *lines]
    before, items = _items(paragraph)
    found = [before] if before else []
    found += [""] if before and items else []
    for names, meaning, raises in items:
        bold = ", ".join(f"`{name}`" for name in names.split(", "))
        found.append(f"- {bold}: {meaning}")
        found += ["", raises] if raises else []
    return found
