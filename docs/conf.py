"""Settings of the documentation site: `make docs` builds docs/ into build/docs.

The build is strict: a warning, such as a link to a page that does not exist, is an error. It works
without a network. A Mermaid diagram is shown as its text: Sphinx needs Node.js or a CDN to draw it.
"""

import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import rekindle

sys.path.append(str(Path(__file__).parent / "tools"))

project = "Rekindle"
author = "The Rekindle contributors"
copyright = author  # noqa: A001  Sphinx reads this name
version = release = rekindle.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "outside_links"]

# A sample of output need not be correct JSON or YAML.
suppress_warnings = ["misc.highlighting_failure"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# An option in a sentence keeps its two dashes.
smartquotes = False

# `name` in a docstring is code, as it is in Markdown.
default_role = "code"
autodoc_mock_imports = ["mindspore"]
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Rekindle {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "default"
pygments_dark_style = "github-dark"


class MermaidText(TextLexer):
    """A Mermaid diagram as plain text."""

    name = "Mermaid"
    aliases = ("mermaid",)


def setup(app: Sphinx) -> None:
    """Let pages have Mermaid diagrams."""
    app.add_lexer("mermaid", MermaidText)
