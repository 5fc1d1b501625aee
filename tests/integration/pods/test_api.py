"""Requests to an API server that fails in the same ways as real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.launch import Simulated
from waiting import bound_s

from rekindle.engines.kubernetes.client.api import Api, load
from rekindle.engines.kubernetes.client.api_errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    MissingObjectError,
)
from rekindle.engines.kubernetes.client.informer import Informer
from rekindle.errors import UsageError

pytestmark = pytest.mark.timeout(300)  # a cluster

MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture(autouse=True)
def left_clean(cluster: Simulated) -> Iterator[None]:
    yield
    for each in cluster.get(MAPS)["items"]:
        cluster.delete(f"{MAPS}/{each['metadata']['name']}")


def named(name: str, **data: str) -> dict[str, object]:
    metadata = {"name": name, "labels": {"test": "yes"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


@pytest.mark.parametrize("code", [429, 500, 503])
def test_what_passes_is_waited_for(code: int, api: Api, cluster: Simulated) -> None:
    cluster.inject("create", "configmaps", count=2, code=code)
    assert api.create(MAPS, named("a"))["metadata"]["name"] == "a"


def test_a_connection_that_is_cut(api: Api, cluster: Simulated) -> None:
    cluster.inject("get", "configmaps", count=2, cut=True)
    api.create(MAPS, named("a"))
    assert api.get(f"{MAPS}/a")["metadata"]["name"] == "a"


def test_refusals_are_told_apart(api: Api) -> None:
    """Each refusal has its own error class and the server's message, without a retry."""
    api.create(MAPS, named("a"))
    with pytest.raises(ConflictError, match='configmaps "a" already exists') as conflict:
        api.create(MAPS, named("a"))
    assert conflict.value.reason == "AlreadyExists"
    with pytest.raises(MissingObjectError, match='"b" not found'):
        api.get(f"{MAPS}/b")
    with pytest.raises(ApiError, match="A_B") as invalid:
        api.create(MAPS, named("A_B"))
    assert invalid.value.status == 422
    with pytest.raises(ConflictError):
        api.delete(f"{MAPS}/a", uid="00000000-0000-0000-0000-000000000000")
    assert api.get(f"{MAPS}/a")["metadata"]["name"] == "a"


def test_a_stranger_is_refused_at_once(cluster: Simulated, tmp_path: Path) -> None:
    """An account without rights gets ForbiddenError immediately.

    The client does not wait, as it does for a restarted server that refuses all accounts for a
    while.
    """
    token = cluster.token_for("stranger")
    api = load(str(cluster.kubeconfig_for(token, tmp_path / "config")))
    with pytest.raises(ForbiddenError, match=r"stranger.* cannot list"):
        api.get(MAPS)
    api.close()


def test_a_server_that_has_begun_anew_refuses_for_a_while(api: Api, cluster: Simulated) -> None:
    api.create(MAPS, named("a"))
    cluster.restart_server(deny_for=1.0)
    assert api.get(f"{MAPS}/a")["metadata"]["name"] == "a"


def test_nobody_answers(cluster: Simulated, tmp_path: Path) -> None:
    """If no server answers, the error after the client's patience has the address."""
    config = tmp_path / "config"
    config.write_text(cluster.kubeconfig.read_text().replace(f":{cluster.port}", ":1"))
    api = load(str(config), patience_s=0.5)
    with pytest.raises(ApiError, match=r"127\.0\.0\.1:1/api.*no answer"):
        api.get(MAPS)
    api.close()


@pytest.mark.parametrize("content", ["", "{", "apiVersion: v1\nkind: Config\n", "- 1\n"])
def test_a_file_that_names_no_cluster(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(UsageError, match="give --kubeconfig FILE"):
        load(str(path))
    with pytest.raises(UsageError, match="nowhere"):
        load(str(tmp_path / "nowhere"))


class ChangeRecorder:
    """Collects the changes of an informer."""

    def __init__(self, api: Api) -> None:
        self.follower = Informer(api, MAPS, labels="test=yes")
        self.changes: list[tuple[str, str, bool]] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        for each, there in self.follower.changes():
            with self._news:
                value = (each.get("data") or {}).get("v", "")
                self.changes.append((each["metadata"]["name"], value, there))
                self._news.notify_all()

    def wait(self, *wanted: tuple[str, str, bool]) -> None:
        with self._news:
            met = self._news.wait_for(
                lambda: self.changes[-len(wanted) :] == [*wanted], bound_s(20)
            )
            assert met, self.changes

    def end(self) -> None:
        self.follower.end()
        self._thread.join(bound_s(20))
        assert not self._thread.is_alive()


@pytest.fixture
def recorder(api: Api) -> Iterator[ChangeRecorder]:
    api.create(MAPS, named("a", v="1"))
    found = ChangeRecorder(api)
    found.wait(("a", "1", True))
    yield found
    found.end()


def change(api: Api, name: str, value: str) -> None:
    api.patch(f"{MAPS}/{name}", {"data": {"v": value}})


def test_changes_as_they_come(api: Api, recorder: ChangeRecorder) -> None:
    change(api, "a", "2")
    api.create(MAPS, named("b", v="1"))
    api.delete(f"{MAPS}/a")
    recorder.wait(("a", "2", True), ("b", "1", True), ("a", "2", False))
    assert (recorder.follower.lists, recorder.follower.watches) == (1, 1)


def test_a_watch_that_is_cut_goes_on(
    api: Api, cluster: Simulated, recorder: ChangeRecorder
) -> None:
    """After a cut the watch continues from its last version, without a second list.

    No change is lost or reported twice.
    """
    cluster.cut("configmaps")
    change(api, "a", "2")
    change(api, "a", "3")
    recorder.wait(("a", "1", True), ("a", "2", True), ("a", "3", True))
    assert recorder.follower.lists == 1


def test_a_server_that_restarts(api: Api, cluster: Simulated, recorder: ChangeRecorder) -> None:
    """After a restart the server has no old versions: the informer lists again.

    The informer reports only the differences.
    """
    cluster.stop_server()
    cluster.start_server()
    change(api, "a", "2")
    recorder.wait(("a", "1", True), ("a", "2", True))


def test_what_went_while_nobody_watched(
    api: Api, cluster: Simulated, recorder: ChangeRecorder
) -> None:
    cluster.inject("watch", "configmaps", count=3, code=500)
    cluster.cut("configmaps")
    api.delete(f"{MAPS}/a")
    cluster.compact()
    recorder.wait(("a", "1", True), ("a", "1", False))


def test_an_expired_version(api: Api, cluster: Simulated, recorder: ChangeRecorder) -> None:
    cluster.inject("watch", "configmaps", count=1, code=410)
    cluster.cut("configmaps")
    change(api, "a", "2")
    recorder.wait(("a", "1", True), ("a", "2", True))
    assert recorder.follower.lists == 2
