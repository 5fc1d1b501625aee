"""The Markdown of generated pages: headings, tables and cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE = "<!-- `make reference` writes this page from the source. Do not edit it. -->"


def page(title: str, *parts: str) -> str:
    """Return a page of paragraphs, headings and tables."""
    return "\n\n".join((NOTE, f"# {title}", *parts)) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A cell can have any text."""
    lines = [list(map(_cell, row)) for row in rows]
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (list(heads), ["---"] * len(heads), *lines)
    )


def code(text: object) -> str:
    """Return a text as code. An empty text stays empty."""
    return f"`{text}`" if str(text) else ""


def codes(texts: Iterable[object]) -> str:
    """Return texts as code, separated by commas."""
    return ", ".join(map(code, texts))


def sentence(text: str) -> str:
    """Return a text with an initial capital letter and a final full stop."""
    text = " ".join(text.split())
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "?", "!", ":")) else ".")


def _cell(text: str) -> str:
    """Return a text on one line, with the characters escaped that Markdown would interpret."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    # Outside of code, these characters start emphasis or HTML.
    plain = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    parts[::2] = plain
    return "`".join(parts)


def check_names(module: str, source: Iterable[str], rows: Iterable[str]) -> None:
    """Compare the names of the source with the rows of a module of this package.

    Raises ValueError: names have no row, or rows have no name. The message lists them.
    """
    names, known = set(source), set(rows)
    if names != known:
        raise ValueError(
            f"tests/support/reference_tables/{module}.py: add rows for "
            f"{sorted(names - known) or 'nothing'}, remove those of "
            f"{sorted(known - names) or 'nothing'}"
        )
