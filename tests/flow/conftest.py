"""One Prefect server and one served train flow for all tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from flow.prefect_side import Served, free_port, serve, server


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prefect server's API."""
    with server(tmp_path_factory.mktemp("prefect"), free_port()) as api:
        yield api


@pytest.fixture(scope="session")
def served(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The train flow, served."""
    home = tmp_path_factory.mktemp("rekindle")
    with serve(prefect_api, home, "tests") as running, ending_jobs(home):
        yield running


@contextlib.contextmanager
def ending_jobs(home: Path) -> Iterator[None]:
    """End what jobs below `home` have left when the block is left: they outlive their flows."""
    try:
        yield
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(home / "jobs") in word for word in process.cmdline()):
                    process.kill()
