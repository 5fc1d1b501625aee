"""A place for the jobs of each test; the test fails if it leaves a process or a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Return a folder with its own home; at the end no process or memory file may remain."""
    with Place(tmp_path / "place") as found:
        yield found
