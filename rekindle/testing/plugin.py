"""The pytest plugin: a fixture that runs training scripts and breaks them on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rekindle.testing.runs import Run


@pytest.fixture
def rekindle_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start `rekindle run` of a script: `rekindle_run("train.py", "--lr=0.1", nproc_per_node=4)`.

    Keyword arguments are options of `rekindle run`, with underscores. The script starts in the
    folder `working_directory`, by default pytest's folder. Each run has its own job directory, and
    ends with the test.
    """
    from rekindle.testing.runs import Run  # only for tests that use it: pytest loads every plugin

    runs: list[Run] = []

    def start(script: str | Path, *arguments: str, **options: object) -> Run:
        runs.append(Run(tmp_path / f"rekindle{len(runs)}", str(script), arguments, options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
