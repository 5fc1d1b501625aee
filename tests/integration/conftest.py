"""The Prefect server that all tests of a worker share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the server; return the address of its API."""
    from prefect_side import free_port, server  # Prefect takes seconds to import

    with server(tmp_path_factory.mktemp("prefect"), free_port()) as address:
        yield address
