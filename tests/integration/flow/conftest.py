"""A served train flow for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect_side import Served, ending_jobs, serve
from training_jobs.baselines import baseline, baseline_of

__all__ = ["baseline", "baseline_of"]


@pytest.fixture(scope="session")
def served(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the train flow."""
    home = tmp_path_factory.mktemp("rekindle")
    with serve(prefect_api, home, "tests") as running, ending_jobs(home):
        yield running
