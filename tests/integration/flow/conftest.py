"""A served train flow for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect_side import Served, ending_jobs, serve
from training_jobs.baselines import baseline, baseline_of

__all__ = ["baseline", "baseline_of"]


@pytest.fixture(scope="session", autouse=True)
def accelerators() -> Iterator[None]:
    """Hide the accelerators: a job holds each one that it sees, and these jobs run at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def served(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the train flow."""
    home = tmp_path_factory.mktemp("rekindle")
    with serve(prefect_api, home, "tests") as running, ending_jobs(home):
        yield running
