"""Stacks of ranks: the files of Rekindle by which a wait is known."""

from __future__ import annotations

import pytest
from repository import ROOT

from rekindle.rank import stacks

OURS = sorted(p for p in {*stacks._WAITS, *stacks._WRAPPERS} if p.startswith("training/"))


@pytest.mark.parametrize("path", OURS)
def test_a_file_by_which_a_wait_is_known_exists(path: str) -> None:
    """A file that moves takes its name here along."""
    assert (ROOT / "rekindle" / path).is_file()


def test_some_file_is_ours() -> None:
    assert OURS
