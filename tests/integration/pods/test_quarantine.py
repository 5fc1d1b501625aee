"""Marks of isolated nodes: how Rekindle cordons or taints a node, and how a release reverts it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.launch import Simulated
from cluster.manifests import pod
from waiting import join

from rekindle.cli.main import main
from rekindle.engines.kubernetes.client.api import Api, load
from rekindle.engines.kubernetes.client.api_errors import ForbiddenError
from rekindle.engines.kubernetes.labels import HOSTS, ISOLATED
from rekindle.engines.kubernetes.manifests.settings import IsolationMode, KubernetesSettings
from rekindle.engines.kubernetes.placement.quarantine import (
    NODES,
    Hosts,
    IsolationMark,
    Quarantine,
    mark_on,
)
from rekindle.errors import JobError
from rekindle.recovery.journal.host_history import HostIsolated, HostReleased

pytestmark = pytest.mark.timeout(300)  # a cluster

Object = dict[str, Any]
PACE_S = 0.01  # between two writes of another client
DEFAULT = "/api/v1/namespaces/default"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
BAD = f"{NODES}/node-0"
HOWS = pytest.mark.parametrize("how", [IsolationMode.CORDON, IsolationMode.TAINT])


@pytest.fixture(autouse=True)
def left_clean(cluster: Simulated) -> Iterator[None]:
    yield
    cluster.call("DELETE", f"{DEFAULT}/configmaps/{HOSTS}")
    back = {"metadata": {"annotations": {ISOLATED: None}}}
    cluster.patch(BAD, back | {"spec": {"unschedulable": None, "taints": None}})
    for each in cluster.get(f"{DEFAULT}/pods")["items"]:
        cluster.call("DELETE", f"{DEFAULT}/pods/{each['metadata']['name']}?gracePeriodSeconds=0")


@pytest.fixture
def command(cluster: Simulated, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a rekindle command for the cluster; return its status and its output."""

    def run(name: str, *words: str, namespace: str = "default") -> str:
        where = ["--kubeconfig", str(cluster.kubeconfig), "--namespace", namespace]
        with pytest.raises(SystemExit) as end:
            main([name, *words, *where])
        output = capfd.readouterr()
        return f"{end.value.code} {output.out}{output.err}"

    return run


def isolated(number: int = 1, host: str = "node-0") -> HostIsolated:
    return HostIsolated(
        host=host, at=float(number), source=f"job#{number}", by="job", reason="XID 79"
    )


def hosts(api: Api, folder: Path, how: IsolationMode, namespace: str = "default") -> Hosts:
    return Hosts(
        api, KubernetesSettings(image="i", isolated_hosts=how, namespace=namespace), folder
    )


def is_free(cluster: Simulated) -> bool:
    node = cluster.get(BAD)
    return not (node["spec"].get("unschedulable") or node["spec"].get("taints") or mark_on(node))


def why_it_waits(found: dict[str, Object]) -> str:
    conditions = (found["other"].get("status") or {}).get("conditions") or []
    return next((c.get("message", "") for c in conditions if c["status"] == "False"), "")


@HOWS
def test_nobody_lands_there_until_it_is_released(
    how: IsolationMode, api: Api, cluster: Simulated, tmp_path: Path, command: Callable[..., str]
) -> None:
    """No pod starts on an isolated node; a pending one starts there after a user's release."""
    hosts(api, tmp_path, how).note(isolated())
    other = pod("other")
    other["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node-0"}
    cluster.create(f"{DEFAULT}/pods", other)
    text = cluster.until(f"{DEFAULT}/pods", why_it_waits)
    assert ("were unschedulable" if how is IsolationMode.CORDON else ISOLATED) in text
    output = command("nodes")
    assert "isolated" in output
    assert f"{'cordoned' if how is IsolationMode.CORDON else 'tainted'}\n" in output
    assert "node-0: XID 79" in output
    assert command("release-node", "node-0") == "0 jobs may use node-0 again\n"
    assert is_free(cluster)
    cluster.until(f"{DEFAULT}/pods", lambda found: found["other"]["spec"].get("nodeName"))


@HOWS
def test_telling_it_again_changes_nothing(
    how: IsolationMode, api: Api, cluster: Simulated, tmp_path: Path
) -> None:
    """A repeated isolation does not change the node, and keeps later changes by a user."""
    known = hosts(api, tmp_path, how)
    known.note(isolated())
    version = cluster.get(BAD)["metadata"]["resourceVersion"]
    known.note(isolated())
    assert cluster.get(BAD)["metadata"]["resourceVersion"] == version
    cluster.patch(BAD, {"spec": {"unschedulable": None, "taints": None}})
    hosts(api, tmp_path / "b", how).note(isolated())
    assert not cluster.get(BAD)["spec"].get("unschedulable")
    assert not cluster.get(BAD)["spec"].get("taints")


def test_what_was_released_is_not_marked_when_it_is_told_late(
    api: Api, cluster: Simulated, tmp_path: Path, command: Callable[..., str]
) -> None:
    """A flow that adopts the job repeats its history; it does not mark a released node."""
    hosts(api, tmp_path, IsolationMode.AVOID).note(isolated())
    assert is_free(cluster)
    command("release-node", "node-0")
    hosts(api, tmp_path, IsolationMode.CORDON).note(isolated())
    assert is_free(cluster)


def test_it_is_released_while_it_is_marked(
    api: Api, cluster: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release during the marking removes the mark."""
    known = hosts(api, tmp_path, IsolationMode.CORDON)
    put = Quarantine.put

    def released_just_then(self: Quarantine, host: str, mark: IsolationMark) -> None:
        known._log.append(HostReleased(host=host, at=9.0, by="me"))
        put(self, host, mark)

    monkeypatch.setattr(Quarantine, "put", released_just_then)
    known.note(isolated())
    assert is_free(cluster)


def test_who_else_had_cordoned_it_has_it_cordoned(
    api: Api, cluster: Simulated, tmp_path: Path, command: Callable[..., str]
) -> None:
    cluster.patch(BAD, {"spec": {"unschedulable": True}})
    hosts(api, tmp_path, IsolationMode.CORDON).note(isolated())
    assert "cordoned, but not by Rekindle" in command("nodes")
    output = command("release-node", "node-0")
    assert output == "0 jobs may use node-0 again; it is still cordoned, but not by Rekindle\n"
    assert cluster.get(BAD)["spec"]["unschedulable"]
    assert mark_on(cluster.get(BAD)) is None


def test_several_at_once(api: Api, cluster: Simulated, tmp_path: Path) -> None:
    """Five simultaneous isolations leave one taint; other writes to the node remain."""
    stop = threading.Event()

    def heartbeat() -> None:
        number = 0
        while not stop.wait(PACE_S):
            number += 1
            cluster.patch(BAD, {"metadata": {"annotations": {"beat": str(number)}}})

    errors: list[Exception] = []

    def note(number: int) -> None:
        own = load(str(cluster.kubeconfig))
        try:
            hosts(own, tmp_path / str(number), IsolationMode.TAINT).note(isolated(number))
        except JobError as error:
            errors.append(error)
        finally:
            own.close()

    threads = [threading.Thread(target=note, args=[n]) for n in range(5)]
    beats = threading.Thread(target=heartbeat)
    for thread in (beats, *threads):
        thread.start()
    for thread in threads:
        join(thread)
    stop.set()
    join(beats)
    assert errors == []
    assert len(cluster.get(BAD)["spec"]["taints"]) == 1
    Quarantine(api).take("node-0", "default")
    assert is_free(cluster)


def test_a_node_that_is_gone_or_made_anew(
    api: Api, cluster: Simulated, tmp_path: Path, command: Callable[..., str]
) -> None:
    """Jobs avoid the name of a missing or recreated node until its release.

    Such a node has no mark that the release would remove.
    """
    known = hosts(api, tmp_path, IsolationMode.CORDON)
    known.note(isolated(host="node-9"))
    assert "no such node" in command("nodes")
    assert known.isolated() == ("node-9",)
    named = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-9"}}
    cluster.create(NODES, named)
    known.note(isolated(2, host="node-9"))
    assert cluster.get(f"{NODES}/node-9")["spec"]["unschedulable"]
    cluster.delete(f"{NODES}/node-9")
    cluster.create(NODES, named)
    assert not cluster.get(f"{NODES}/node-9")["spec"].get("unschedulable")
    assert command("release-node", "node-9") == "0 jobs may use node-9 again\n"
    cluster.delete(f"{NODES}/node-9")


def test_no_rights_on_nodes(
    api: Api, cluster: Simulated, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without rights on nodes the isolation reports an error, and jobs still avoid the host."""
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"]}]
    cluster.call(
        "POST",
        f"{RBAC}/namespaces/default/roles",
        {
            "metadata": {"name": "maps"},
            "rules": rules,
        },
    )
    subject = {"kind": "ServiceAccount", "name": "flows", "namespace": "default"}
    cluster.call(
        "POST",
        f"{RBAC}/namespaces/default/rolebindings",
        {
            "metadata": {"name": "maps"},
            "subjects": [subject],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "maps"},
        },
    )
    config = cluster.kubeconfig_for(cluster.token_for("flows"), tmp_path / "config")
    own = load(str(config))
    known = hosts(own, tmp_path, IsolationMode.CORDON)
    with pytest.raises(
        JobError,
        match=r"node-0 is isolated for .*, but other pods may use it: .*not have the right to",
    ):
        known.note(isolated())
    assert known.isolated() == ("node-0",)
    with pytest.raises(ForbiddenError):
        list(Quarantine(own).nodes())
    for words, status in ((["nodes"], 0), (["release-node", "node-0"], 1)):
        with pytest.raises(SystemExit) as end:
            main([*words, "--kubeconfig", str(config)])
        assert end.value.code == status
    output = capfd.readouterr()
    assert (
        "cannot read the nodes of the cluster: Rekindle does not have the right to list nodes"
        in output.out
    )
    assert "cannot find out whether it is cordoned or tainted" in output.err
    assert known.isolated() == ()
    user = "system:serviceaccount:default:flows"
    asked = {call["resource"] for call in cluster.calls(user=user)}
    assert "nodes" not in asked, "the right is asked for, and not what would be refused"
    own.close()


def test_another_namespace_has_a_log_of_its_own(
    api: Api, cluster: Simulated, tmp_path: Path, command: Callable[..., str]
) -> None:
    """A release in another namespace keeps the mark and names the namespace that owns it."""
    cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": "other"}})
    hosts(api, tmp_path, IsolationMode.CORDON).note(isolated())
    output = command("release-node", "node-0", namespace="other")
    assert (
        "cordoned because of job job: run rekindle release-node node-0 --namespace default"
        in output
    )
    assert cluster.get(BAD)["spec"]["unschedulable"]
    (row,) = json.loads(command("nodes", "--json", namespace="other")[2:])
    assert (row["host"], row["known"], row["mark"]["by"]) == ("node-0", None, "job")
    assert command("nodes", namespace="nowhere").startswith("0 ")


@pytest.mark.parametrize("name", ["", "node-0?x=y", "../nodes/node-0", "a b", "n#"])
def test_a_name_that_no_node_has(
    name: str, api: Api, cluster: Simulated, tmp_path: Path, command: Callable[..., str]
) -> None:
    """An invalid node name does not lead to the release of another node."""
    known = hosts(api, tmp_path, IsolationMode.CORDON)
    known.note(isolated())
    known.note(isolated(2, host=name))
    assert command("release-node", name).startswith("0 ")
    assert cluster.get(BAD)["spec"]["unschedulable"]


def test_nothing_is_known_of_it(api: Api, command: Callable[..., str]) -> None:
    assert command("release-node", "node-0").startswith("2 rekindle: there is no record of a node")
    assert command("release-node", "nowhere").startswith("2 ")
    assert command("nodes", "--json") == "0 []\n"
