"""Secrets of an S3 store do not appear in errors, logs, representations, or the bucket."""

from __future__ import annotations

import logging
import pickle
import traceback

import pytest
from stores import manifest, put, servers
from stores.places import S3Place
from stores.proxy import Answer, Fault, Flip, Proxy, Reset, Rule
from stores.servers import Server

from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.s3 import client as s3_client
from rekindle.checkpoints.s3 import connect as s3_connect
from rekindle.checkpoints.store import CheckpointFile
from rekindle.errors import CheckpointError

TOKEN = "marked-session-token"
SECRETS = (servers.SECRET_KEY, TOKEN, servers.ACCESS_KEY)
# A server may echo everything that it received.
ECHO = f"you sent {' and '.join(SECRETS)}"

FAULTS: list[Fault] = [
    Answer(403, "InvalidToken", ECHO),
    Answer(403, ECHO.replace(" ", "")),
    Answer(500, "InternalError", ECHO),
    Answer(400, "", ECHO),
    Reset(),
    Flip(),
]


def always(fault: Fault) -> Rule:
    """Return a rule that fails each request."""
    return lambda request: fault


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch, credentials: None) -> None:
    monkeypatch.setenv("REKINDLE_STORE_SESSION_TOKEN", TOKEN)
    monkeypatch.setattr(s3_client, "PATIENCE_S", 0.0)
    monkeypatch.setattr(s3_connect, "READ_TIMEOUT_S", 5.0)


def test_no_secret_is_shown(
    marked: None, proxy: Proxy, rclone: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """No error, traceback, representation or log message has a part of the credentials."""
    caplog.set_level(logging.DEBUG)
    store = open_store(rclone.location(port=proxy.port))
    put(store, 1)
    shown = [store.location, repr(store), repr(vars(store)), repr(store.newest())]
    last = Retention(last=1)
    for fault in FAULTS:
        proxy.rule = always(fault)
        for call in (store.newest, store.keys, lambda: put(store, 2), lambda: store.prune(last)):
            try:
                call()
            except CheckpointError as error:
                shown += [str(error), repr(error)]
                shown += traceback.format_exception(error)
    assert len(shown) > 40
    shown += [record.getMessage() for record in caplog.records]
    assert caplog.records
    for text in shown:
        assert not [secret for secret in SECRETS if secret in text]


def test_no_secret_is_stored(marked: None, bucket: S3Place) -> None:
    """No object in the bucket has a secret in its name or its content."""
    put(bucket.open(), 1)
    stored = [*bucket.names(), *map(repr, bucket.tree().values())]
    assert len(stored) == 6
    assert not [secret for secret in SECRETS if any(secret in text for text in stored)]


def test_a_store_does_not_travel_with_its_secrets(marked: None, bucket: S3Place) -> None:
    """A store cannot be pickled: other processes get its location."""
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(bucket.open())


def test_credentials_of_the_environment_come_first(
    bucket: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own credentials have priority over AWS credentials.

    Without its own, the store uses AWS credentials.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    put(bucket.open(), 1)
    for name in servers.ENVIRONMENT:
        monkeypatch.delenv(name)
    with pytest.raises(CheckpointError, match="give valid credentials"):
        bucket.open().newest()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
    assert bucket.open().write(manifest(1), {"a": CheckpointFile([b"a"], (0,))}).existed
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/not/there")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CheckpointError, match="there are no credentials; give valid"):
        bucket.open().newest()
