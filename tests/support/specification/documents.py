"""The documents that have rows so far, and those that have none yet."""

from __future__ import annotations

from specification import document_002, document_003, document_004
from specification.row import Document

DOCUMENTS: tuple[Document, ...] = (
    document_002.DOCUMENT,
    document_003.DOCUMENT,
    document_004.DOCUMENT,
)
NOT_COVERED = {
    "000": "MindCluster: online recovery of processes",
    "001": "TaskD: profiling of slow nodes",
}
