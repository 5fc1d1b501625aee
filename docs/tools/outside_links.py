"""Links of pages to files of the repository outside of docs/, such as an example.

On the site such a file is a download. A link to a folder becomes the name of the folder. A file
that does not exist stays a link, which the strict build refuses.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)\s]*)?\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Be an extension of Sphinx."""
    app.connect("source-read", _on_source_read)
    return {"parallel_read_safe": True}


def _on_source_read(app: Sphinx, page: str, content: list[str]) -> None:
    pages = Path(app.srcdir).resolve()
    content[0] = with_downloads(content[0], (pages / page).parent, pages)


def with_downloads(text: str, folder: Path, pages: Path) -> str:
    """Return a page with links to files outside of the pages as downloads. folder: the page's."""

    def replace(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(pages) or not target.exists():
            return link[0]
        label = link[1].strip("`")
        return f"`{label}`" if target.is_dir() else f"{{download}}`{label} <{link[2]}>`"

    return _LINK.sub(replace, text)
