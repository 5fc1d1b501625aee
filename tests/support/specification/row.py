"""A row: one sentence of a document, what Rekindle does about it, and what proves that."""

from __future__ import annotations

import dataclasses
import enum


class Evidence(str, enum.Enum):
    """How far a row is proven."""

    RUN = "run"  # a test runs the path from a command, manifest or flow to the result
    SIGNATURE = "signature"  # a test compares the call with the real package
    SOURCE = "source"  # a test of one part only, or a comparison with the source of the platform
    NONE = "none"  # Rekindle does otherwise, or no test shows it


@dataclasses.dataclass(frozen=True)
class Row:
    """One sentence.

    - `heading`: the heading of its section in the document.
    - `says`: a paraphrase.
    - `does`: what Rekindle does.
    - `tests`: `file::function`, below `tests/`, with the act of a job with many faults in brackets.
    """

    heading: str
    says: str
    does: str
    evidence: Evidence
    tests: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, and its rows in the order of its sentences. The first row has number 1."""

    number: str
    title: str
    rows: tuple[Row, ...]


def run(heading: str, says: str, does: str, *tests: str) -> Row:
    """Return a row that tests run from end to end."""
    return Row(heading, says, does, Evidence.RUN, tests)


def source(heading: str, says: str, does: str, *tests: str) -> Row:
    """Return a row of which a test shows one part."""
    return Row(heading, says, does, Evidence.SOURCE, tests)


def none(heading: str, says: str, does: str) -> Row:
    """Return a row that nothing proves, or that Rekindle does not obey."""
    return Row(heading, says, does, Evidence.NONE)
