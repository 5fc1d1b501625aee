"""Translates Rekindle's docstrings into reStructuredText.

A docstring of Rekindle has paragraphs of three forms:

    A sentence, over one line or several.

    name: what an argument is. other, another: several in one paragraph. Each that stands at the
        start of a line becomes an item of a list; an indented line continues it.

        an example: code, indented, after a blank line

`Raises Error: when.` is a sentence. A paragraph of items is a list of definitions for a reader.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# The start of a line that explains one name or several, and of one that is a sentence.
_ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): ")
_SENTENCE = re.compile(r"(?:Return|Raises|Example)\b")


def setup(app: Sphinx) -> dict[str, bool]:
    """Be an extension of Sphinx."""
    app.connect("autodoc-process-docstring", to_rst)
    return {"parallel_read_safe": True}


def to_rst(_app: object, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]):
    """Replace the lines of a docstring (autodoc-process-docstring)."""
    text = inspect.cleandoc("\n".join(lines))
    paragraphs = [each for each in re.split(r"\n\s*\n", text) if each.strip()]
    lines[:] = [line for each in paragraphs for line in (*_paragraph(each), "")]


def _paragraph(text: str) -> list[str]:
    lines = text.splitlines()
    if all(line.startswith("    ") for line in lines):
        return ["::", "", *(f"    {line}" for line in lines)]
    if not any(_ITEM.match(line) for line in lines):
        return [line.strip() for line in lines]
    found: list[str] = []
    for line in lines:
        begins = _ITEM.match(line)
        if begins:
            names = ", ".join(f"`{name}`" for name in begins[1].split(", "))
            found += [f"- {names}: {line[begins.end() :]}"]
        elif _SENTENCE.match(line) and found:
            found += ["", line]
        elif found and found[-1].startswith(("- ", "  ")):
            found.append(f"  {line.strip()}")
        else:
            found.append(line.strip())
    return found
