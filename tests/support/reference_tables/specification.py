"""The reference page of the specification. It follows from the rows of its documents."""

from __future__ import annotations

from collections import Counter

from specification.documents import DOCUMENTS
from specification.named import is_soak
from specification.row import Document, Evidence, Row

from reference_tables.markdown import code, page, table

_MEANING = {
    Evidence.RUN: "a test runs the path from a command, manifest or flow to the result",
    Evidence.SIGNATURE: "a test compares the call with the real package",
    Evidence.SOURCE: "a test shows one part only, or a comparison with the source of the platform",
    Evidence.NONE: "Rekindle does otherwise, or no test shows it",
}
_INTRO = """The documents of other systems specify what Rekindle must do. This page has a row for
each sentence that promises or demands something, and for each option, annotation, variable, default
and path. Each sentence is a paraphrase. Read the rows with the evidence `none` first: there
Rekindle does something else, or nothing. The tests are below `tests/`. Only `make soak` runs those
with the word soak. Run one of them as in [promises.md](promises.md#run-the-tests). No test ran on
an NPU."""


def specification() -> str:
    """Return the page."""
    heads = ("evidence", "meaning", *(f"rows of {each.number}" for each in DOCUMENTS))
    counts = [Counter(row.evidence for row in each.rows) for each in DOCUMENTS]
    rows = [
        (code(kind.value), _MEANING[kind], *(str(count[kind]) for count in counts))
        for kind in Evidence
    ]
    parts = [_INTRO, table(heads, rows)]
    for document in DOCUMENTS:
        parts += [f"## {document.number}: {document.title}", _rows(document)]
    return page("Specification", *parts)


def _rows(document: Document) -> str:
    heads = ("no.", "heading", "the document says", "Rekindle does", "evidence", "tests")
    return table(heads, [_cells(at, row) for at, row in enumerate(document.rows, 1)])


def _cells(at: int, row: Row) -> tuple[str, ...]:
    evidence = code(row.evidence.value)
    tests = ", ".join(f"{code(test)}{' (soak)' if is_soak(test) else ''}" for test in row.tests)
    return str(at), row.heading, row.says, row.does, evidence, tests
