"""A place for the jobs of each test, in which nothing may be left."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder with a home of its own; after the test no process and no memory file is left."""
    with Place(tmp_path / "place") as found:
        yield found
