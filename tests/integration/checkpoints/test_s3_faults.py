"""The S3 store on a failing server: it retries temporary failures and explains the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stores import content, manifest, put, servers, shard, with_files, write_parts
from stores.places import S3Place
from stores.proxy import Answer, Fault, Flip, Late, Proxy, Request, Reset, Rule, Stall
from stores.servers import Server

from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.retention import Retention
from rekindle.checkpoints.s3 import client as s3_client
from rekindle.checkpoints.store import CheckpointFile, CheckpointStore
from rekindle.errors import CheckpointError


def every(count: int, fault: Fault) -> Rule:
    """Return a rule that fails the last of every `count` requests."""
    return lambda request: fault if request.number % count == count - 1 else None


def each_once(fault: Fault) -> Rule:
    """Return a rule that fails the first request of each method and path."""
    seen: set[tuple[str, str]] = set()

    def rule(request: Request) -> Fault | None:
        same = (request.method, request.path)
        if same in seen:
            return None
        seen.add(same)
        return fault

    return rule


PASSING: dict[str, Rule] = {
    "500": each_once(Answer(500, "InternalError")),
    "slow-down": each_once(Answer(503, "SlowDown")),
    "no-body": each_once(Answer(502)),
    "reset": each_once(Reset()),
    "lost-answer": each_once(Reset(passed_on=True)),
    "late": every(4, Late(0.3)),
    "damaged": each_once(Flip()),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_outlived(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place, fault: str
) -> None:
    """The store repeats requests that fail, break off, or get damaged or late answers.

    Writes, reads and prunes then succeed.
    """
    proxy.rule = PASSING[fault]
    for step in (1, 2):
        assert put(broken, step).existed is False
    found = broken.newest()
    assert found.checkpoint
    assert (found.checkpoint.manifest.step, found.passed_over) == (2, ())
    assert content(found.checkpoint)["state-0.safetensors"] == bytes(shard(2))
    assert len(broken.prune(Retention(last=1))) == 1
    proxy.rule = lambda request: None
    assert bucket.names() == bucket.files(2)
    assert len(bucket.names()) == 3


def test_a_body_that_stalls_is_asked_for_again(broken: CheckpointStore, proxy: Proxy) -> None:
    """A read repeats a request whose answer stalls."""
    put(broken, 1)
    stalls = itertools.count()
    proxy.rule = lambda request: Stall() if "state-0" in request.path and not next(stalls) else None
    checkpoint = broken.newest().checkpoint
    assert checkpoint
    assert next(stalls) > 1
    assert content(checkpoint)["state-0.safetensors"] == bytes(shard(1))


def test_a_server_that_is_gone_for_a_while_is_outlived(credentials: None, tmp_path: Path) -> None:
    """A write that starts before the server listens succeeds after the server starts."""
    port = servers.free_port()
    store = open_store(Server(port).location())
    with servers.rclone(tmp_path / "served", port):
        put(store, 1)
    with servers.later(tmp_path / "served", port, 2.0):
        assert put(store, 2).existed is False
        found = store.newest().checkpoint
        assert found
        assert found.manifest.step == 2


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_server_that_is_gone_for_a_minute_is_outlived(credentials: None, tmp_path: Path) -> None:
    """With the default patience a store waits for a server that restarts within a minute."""
    port = servers.free_port()
    store = open_store(Server(port).location())
    with servers.later(tmp_path / "served", port, 60.0):
        assert put(store, 1).existed is False


REFUSED: dict[str, tuple[Fault, str]] = {
    "expired": (Answer(403, "ExpiredToken"), "403 ExpiredToken; give new credentials"),
    "expired-400": (Answer(400, "ExpiredToken"), "400 ExpiredToken; give new credentials"),
    "key": (Answer(403, "InvalidAccessKeyId"), "give valid credentials in REKINDLE_STORE_"),
    "signature": (Answer(403, "SignatureDoesNotMatch"), "give valid credentials in"),
    "denied": (Answer(403, "AccessDenied"), "give these credentials the right to"),
    "bucket": (Answer(404, "NoSuchBucket"), "create the bucket, or correct its name"),
    "clock": (Answer(403, "RequestTimeTooSkewed"), "set the clock"),
    "region": (Answer(400, "AuthorizationHeaderMalformed"), "check the endpoint, region"),
    "unknown": (Answer(418), "the server answered 418; check the endpoint"),
}


@pytest.mark.parametrize("refusal", REFUSED)
def test_what_will_not_pass_is_explained_at_once(
    broken: CheckpointStore, proxy: Proxy, refusal: str
) -> None:
    """A refusal ends each call after one request, with the server's answer and advice."""
    fault, message = REFUSED[refusal]
    put(broken, 1)
    proxy.rule = lambda request: fault
    for call in _calls(broken):
        proxy.seen.clear()
        with pytest.raises(CheckpointError, match=message) as caught:
            call()
        assert "s3://checkpoints/" in str(caught.value)
        assert len(proxy.seen) == 1


def test_what_does_not_pass_in_time_is_explained(
    proxy: Proxy, rclone: Server, credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a server stays broken, a call ends after the patience, with the answer and advice."""
    monkeypatch.setattr(s3_client, "PATIENCE_S", 0.5)
    monkeypatch.setattr(s3_client, "_PAUSES_S", (0.1, 0.2))
    store = open_store(rclone.location(port=proxy.port))
    proxy.rule = lambda request: Answer(503, "SlowDown")
    for call in _calls(store):
        with pytest.raises(CheckpointError, match=r"503 SlowDown.*; check the endpoint"):
            call()
        assert len(proxy.seen) > 2
    nobody = open_store(rclone.location(port=servers.free_port()))
    for call in _calls(nobody):
        with pytest.raises(
            CheckpointError, match=r"the client cannot reach the server.*; check the end"
        ):
            call()


def reading_step_2(fault: Fault) -> Rule:
    """Return a rule that fails each read of one file of step 2."""

    def rule(request: Request) -> Fault | None:
        wanted = "step-0000000002-g000001/state-1" in request.path
        return fault if request.method == "GET" and wanted else None

    return rule


def test_one_object_that_cannot_be_read_is_passed_over(
    broken: CheckpointStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server answers but one object cannot be read, the older checkpoint is used.

    The result has the reason. If no object can be read, the call is an error.
    """
    monkeypatch.setattr(s3_client, "PATIENCE_S", 0.3)
    put(broken, 1)
    put(broken, 2)
    again = open_store(broken.location)
    proxy.rule = reading_step_2(Answer(500, "InternalError"))
    found = again.newest()
    assert found.checkpoint
    assert found.checkpoint.manifest.step == 1
    (passed_over,) = found.passed_over
    assert passed_over.reason.startswith("it cannot be read: cannot read s3://checkpoints/")
    proxy.rule = lambda request: Answer(500, "InternalError")
    with pytest.raises(CheckpointError, match="500 InternalError"):
        again.newest()


def test_an_archived_object_is_passed_over(broken: CheckpointStore, proxy: Proxy) -> None:
    """If a file is archived, the older checkpoint is used and the reason advises a restore."""
    put(broken, 1)
    put(broken, 2)
    again = open_store(broken.location)
    proxy.rule = reading_step_2(Answer(403, "InvalidObjectState"))
    found = again.newest()
    assert found.checkpoint
    assert found.checkpoint.manifest.step == 1
    assert "restore the object from the archive" in found.passed_over[0].reason


def test_a_server_without_conditions_and_lists_of_uploads_is_used(
    broken: CheckpointStore, proxy: Proxy
) -> None:
    """If the server does not support a request, the store works without that request."""

    def rule(request: Request) -> Fault | None:
        return Answer(501, "NotImplemented") if "uploads" in request.path else None

    proxy.rule = rule
    put(broken, 1)
    conditions = itertools.count()
    proxy.rule = lambda request: (
        Answer(501, "NotImplemented")
        if request.method == "PUT" and "manifest" in request.path and not next(conditions)
        else None
    )
    assert put(broken, 2).existed is False
    assert next(conditions) == 2
    assert broken.keys() == [(2, 1), (1, 1)]


def test_a_part_that_goes_while_it_is_committed_is_missed(
    broken: CheckpointStore, proxy: Proxy, bucket: S3Place
) -> None:
    """If another process removes a part during a commit, the commit fails without a checkpoint."""
    files = write_parts(broken, 1)

    def rule(request: Request) -> None:
        if request.method == "PUT" and "manifest" in request.path:
            bucket.delete(bucket.files(1)[0])

    proxy.rule = rule
    with pytest.raises(CheckpointError, match=r"during the commit \(state-0 is miss"):
        broken.commit(with_files(1, files))
    assert broken.keys() == []
    assert broken.newest().checkpoint is None


def test_a_long_list_is_read_to_its_end(bucket: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store reads all pages of a list; a server that repeats a page is an error."""
    store = bucket.open()
    for step in range(5):
        put(store, step)
    do = s3_client.Bucket._do

    def two_at_once(bucket: s3_client.Bucket, operation: str, **arguments: Any) -> Any:
        if operation == "list_objects":
            arguments.setdefault("MaxKeys", 2)
        return do(bucket, operation, **arguments)

    monkeypatch.setattr(s3_client.Bucket, "_do", two_at_once)
    assert len(store.keys()) == 5
    put(store, 5)
    assert len(store.prune(Retention(last=1))) == 5
    assert len(bucket.names()) == 3
    answer = {"IsTruncated": True, "Contents": []}
    monkeypatch.setattr(s3_client.Bucket, "_do", lambda *_, **__: answer)
    with pytest.raises(CheckpointError, match="the server did not return the next page"):
        store.keys()


def test_certificates_are_verified(credentials: None, tmp_path: Path) -> None:
    """The store refuses a certificate of an unknown authority, unless the location names it.

    With `verify=false` the store accepts each certificate.
    """
    certificate, key = servers.certificate(tmp_path)
    more = ("--cert", str(certificate), "--key", str(key))
    with servers.rclone(tmp_path / "served", 0, *more) as server:
        location = server.location()
        with pytest.raises(CheckpointError, match="the server's TLS certificate; give the cert"):
            put(open_store(location), 1)
        put(open_store(f"{location}&verify={certificate}"), 1)
        put(open_store(f"{location}&verify=false"), 2)


def test_a_server_without_tls_is_told(rclone: Server, credentials: None) -> None:
    """If the location has https but the server speaks http, the error names this mistake."""
    with pytest.raises(CheckpointError, match=r"does not speak TLS; .*check the endpoint"):
        open_store(rclone.location().replace("http:", "https:")).newest()


def _calls(store: CheckpointStore) -> Iterator[Callable[[], object]]:
    yield lambda: store.write(manifest(5), {"a": CheckpointFile([b"a"], (0,))})
    yield lambda: store.write_part(5, 1, "a", CheckpointFile([b"a"], (0,)))
    yield store.newest
    yield store.keys
    yield lambda: store.find(1, 1)
    yield lambda: store.prune(Retention(last=1))
