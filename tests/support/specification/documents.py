"""The documents of the specification, in the order of their numbers."""

from __future__ import annotations

from specification import document_000, document_001, document_002, document_003, document_004
from specification.row import Document

DOCUMENTS: tuple[Document, ...] = (
    document_000.DOCUMENT,
    document_001.DOCUMENT,
    document_002.DOCUMENT,
    document_003.DOCUMENT,
    document_004.DOCUMENT,
)
