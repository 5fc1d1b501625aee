"""A directory store for each test, and stores of each kind on real servers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stores import servers
from stores.fixtures import root, store
from stores.places import DirectoryPlace, Place, S3Place
from stores.proxy import Proxy, proxied
from stores.servers import Server

from rekindle.checkpoints.location import S3Location, parse
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.s3 import client as s3_client
from rekindle.checkpoints.s3 import connect as s3_connect
from rekindle.checkpoints.store import CheckpointStore

__all__ = ["root", "store"]


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.rclone(tmp_path_factory.mktemp("rclone") / "served") as server:
        yield server


@pytest.fixture(scope="session")
def rclone_client(rclone: Server) -> Iterator[Any]:
    with contextlib.closing(rclone.client()) as client:
        yield client


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.moto(tmp_path_factory.mktemp("moto") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def moto_client(moto: Server) -> Iterator[Any]:
    with contextlib.closing(moto.client()) as client:
        yield client


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the servers' credentials in the environment of this process and its children."""
    for name, value in servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["directory", "rclone", "moto"])
def place(request: pytest.FixtureRequest, root: Path, credentials: None) -> Place:
    """Return the place of a new store, of each kind in turn."""
    if request.param == "directory":
        return DirectoryPlace(root)
    server = request.getfixturevalue(request.param)
    client = request.getfixturevalue(f"{request.param}_client")
    # rclone's server ignores If-None-Match.
    return S3Place(server, client, creates_once=request.param == "moto")


@pytest.fixture
def bucket(rclone: Server, rclone_client: Any, credentials: None) -> S3Place:
    """Return the place of a new store on rclone's server."""
    return S3Place(rclone, rclone_client, creates_once=False)


@pytest.fixture
def proxy(rclone: Server) -> Iterator[Proxy]:
    """Start a proxy in front of rclone's server."""
    with proxied(rclone.port) as proxy:
        yield proxy


@pytest.fixture
def broken(
    proxy: Proxy, bucket: S3Place, rclone: Server, monkeypatch: pytest.MonkeyPatch
) -> CheckpointStore:
    """Return the store of `bucket` through the proxy, with short pauses and timeouts."""
    monkeypatch.setattr(s3_client, "_PAUSES_S", (0.02, 0.2))
    monkeypatch.setattr(s3_connect, "READ_TIMEOUT_S", 2.0)
    where = parse(bucket.location)
    assert isinstance(where, S3Location)
    return open_store(rclone.location(where.prefix, port=proxy.port))
