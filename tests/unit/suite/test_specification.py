"""The rows of the specification name tests that exist, and each of its tests has a row."""

from __future__ import annotations

import pytest
from specification.documents import DOCUMENTS
from specification.named import functions, parsed
from specification.row import Document, Evidence, Row

FOLDER = "integration/specification"
ROWS = [
    pytest.param(row, id=f"{document.number}-{at}")
    for document in DOCUMENTS
    for at, row in enumerate(document.rows, 1)
]


@pytest.mark.parametrize("row", ROWS)
def test_a_named_test_exists(row: Row) -> None:
    """The file has the test, and the act in brackets."""
    for test in row.tests:
        named = parsed(test)
        assert {named.name, named.act or named.name} <= functions(named.path).keys(), test


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_complete(row: Row) -> None:
    """A row with evidence names a test, and every row says what Rekindle does, in English."""
    assert bool(row.tests) is (row.evidence is not Evidence.NONE)
    for text in (row.heading, row.says, row.does):
        assert text
        assert text.isascii()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.number)
def test_each_test_of_a_document_has_a_row(document: Document) -> None:
    """No test of a document proves a sentence that has no row."""
    path = f"{FOLDER}/test_{document.number}.py"
    named = {parsed(test) for row in document.rows for test in row.tests}
    known = {name for name in functions(path) if name.startswith("test_")}
    assert known == {each.name for each in named if each.path == path}


def test_each_document_has_rows() -> None:
    """All five documents have rows, in the order of their numbers."""
    assert [each.number for each in DOCUMENTS] == ["000", "001", "002", "003", "004"]
