"""Test watches and lists: versions, bookmarks, and versions that are too old or too new."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.client import Cluster
from cluster.launch import Simulated
from cluster.manifests import config_map
from kubernetes import client, watch
from kubernetes.client import ApiException
from waiting import join, wait_set, wait_until


@pytest.fixture
def maps(shared_cluster: Cluster, namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


def events(cluster: Cluster, path: str, **query: Any) -> list[tuple[str, str]]:
    """Return the type and the name of each event of a watch that ends."""
    text = "&".join(f"{name}={value}" for name, value in query.items())
    _, answer = cluster.call("GET", f"{path}?watch=1&{text}")
    lines = answer if isinstance(answer, str) else json.dumps(answer)
    found = []
    for line in filter(None, lines.split("\n")):
        event = json.loads(line)
        thing = event["object"]
        found.append((event["type"], thing["metadata"].get("name", "")))
    return [each for each in found if each[1] != "kube-root-ca.crt"]


def version(cluster: Cluster, path: str) -> str:
    return str(cluster.get(path)["metadata"]["resourceVersion"])


def test_a_watch_goes_on_from_a_version(shared_cluster: Cluster, maps: str) -> None:
    """A watch from a version returns all later events, in order."""
    before = version(shared_cluster, maps)
    shared_cluster.create(maps, config_map("a"))
    shared_cluster.patch(f"{maps}/a", {"data": {"x": "1"}})
    shared_cluster.delete(f"{maps}/a")
    found = events(shared_cluster, maps, resourceVersion=before, timeoutSeconds=1)
    assert found == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


def test_without_a_version_a_watch_begins_with_what_is(shared_cluster: Cluster, maps: str) -> None:
    """A watch without a version starts with an ADDED event for each object."""
    shared_cluster.create(maps, config_map("a"))
    assert events(shared_cluster, maps, timeoutSeconds=1) == [("ADDED", "a")]


def test_what_ceases_to_match_is_deleted(shared_cluster: Cluster, maps: str) -> None:
    """In a watch with a selector, an object that starts to match is ADDED.

    An object that no longer matches is DELETED.
    """
    shared_cluster.create(maps, config_map("a"))
    before = version(shared_cluster, maps)
    for value in ("yes", "no"):
        shared_cluster.patch(f"{maps}/a", {"metadata": {"labels": {"in": value}}})
    query = {"resourceVersion": before, "timeoutSeconds": 1, "labelSelector": "in%3Dyes"}
    assert events(shared_cluster, maps, **query) == [("ADDED", "a"), ("DELETED", "a")]


def test_a_watch_ends_with_a_bookmark(shared_cluster: Cluster, maps: str) -> None:
    """A watch with allowWatchBookmarks ends with a BOOKMARK event."""
    before = version(shared_cluster, maps)
    query = {"resourceVersion": before, "timeoutSeconds": 3, "allowWatchBookmarks": "true"}
    assert ("BOOKMARK", "") in events(shared_cluster, maps, **query)


@pytest.mark.simulated
def test_a_forgotten_version_is_an_error_event(shared_cluster: Simulated, maps: str) -> None:
    """A watch from a version that the server no longer has gets an ERROR event with code 410.

    The Kubernetes client retries once and then raises an ApiException.
    """
    before = version(shared_cluster, maps)
    shared_cluster.compact()
    _, event = shared_cluster.call("GET", f"{maps}?watch=1&resourceVersion={before}")
    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")
    assert event["object"]["message"].startswith("too old resource version")
    api = client.CoreV1Api(shared_cluster.admin)
    namespace = maps.split("/")[4]
    with pytest.raises(ApiException) as caught:
        for _ in watch.Watch().stream(
            api.list_namespaced_config_map, namespace, resource_version=before
        ):
            pass
    assert caught.value.status == 410


@pytest.mark.simulated
def test_a_watch_that_runs_is_not_touched_by_forgetting(
    shared_cluster: Simulated, maps: str
) -> None:
    """A running watch continues after the server drops old versions."""
    seen: list[str] = []
    began = threading.Event()

    def follow() -> None:
        api = client.CoreV1Api(shared_cluster.admin)
        shared_cluster.create(maps, config_map("first"))
        watching = watch.Watch()
        for event in watching.stream(
            api.list_namespaced_config_map, maps.split("/")[4], timeout_seconds=20
        ):
            seen.append(event["object"].metadata.name)
            began.set()
            if seen[-1] == "second":
                watching.stop()

    thread = threading.Thread(target=follow)
    thread.start()
    wait_set(began)
    shared_cluster.compact()
    shared_cluster.create(maps, config_map("second"))
    join(thread)
    assert seen[-1] == "second"


def test_a_list_of_the_future_times_out(shared_cluster: Cluster, maps: str) -> None:
    """A list at a future version gets 504 with the cause ResourceVersionTooLarge."""
    code, answer = shared_cluster.call("GET", f"{maps}?resourceVersion=999999999")
    assert (code, answer["reason"]) == (504, "Timeout")
    assert "Too large resource version" in answer["message"]
    assert answer["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


def test_nothing_is_lost_between_list_and_watch(shared_cluster: Cluster, maps: str) -> None:
    """Consecutive watches miss no object and repeat none while another thread creates objects."""
    count = 60

    def write() -> None:
        for number in range(count):
            shared_cluster.create(maps, config_map(f"m{number}"))

    before = version(shared_cluster, maps)
    thread = threading.Thread(target=write)
    thread.start()
    found: list[str] = []

    def is_complete() -> bool:
        nonlocal before
        for kind, name, at in _pieces(shared_cluster, maps, before):
            assert kind == "ADDED"
            found.append(name)
            before = at
        return len(found) >= count

    wait_until(is_complete, f"{count} objects")
    join(thread)
    assert found == [f"m{number}" for number in range(count)]


def _pieces(cluster: Cluster, path: str, since: str) -> Iterator[tuple[str, str, str]]:
    _, answer = cluster.call("GET", f"{path}?watch=1&timeoutSeconds=1&resourceVersion={since}")
    lines = answer if isinstance(answer, str) else json.dumps(answer)
    for line in filter(None, lines.split("\n")):
        event = json.loads(line)
        metadata = event["object"]["metadata"]
        yield event["type"], metadata["name"], metadata["resourceVersion"]
