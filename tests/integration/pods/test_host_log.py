"""The host log in the cluster: shared, bounded, and consistent with several writers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cluster.launch import Simulated

from rekindle.engines.hosts import HostLog
from rekindle.engines.kubernetes.client.api import Api, load
from rekindle.engines.kubernetes.labels import HOSTS
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.placement import host_log
from rekindle.engines.kubernetes.placement.host_log import MOST_BYTES, ClusterHostLog
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.errors import JobError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal.host_history import (
    HostChecked,
    HostFault,
    HostIsolated,
    HostReleased,
)
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.recovery.node_check.verdicts import Health

pytestmark = pytest.mark.timeout(300)  # a cluster

MAPS = "/api/v1/namespaces/default/configmaps"
PODS = KubernetesSettings(image="training")


@pytest.fixture(autouse=True)
def left_clean(cluster: Simulated) -> Iterator[None]:
    yield
    cluster.call("DELETE", f"{MAPS}/{HOSTS}")


@pytest.fixture
def log(api: Api) -> ClusterHostLog:
    return ClusterHostLog(api, "default")


def isolated(host: str, number: int = 0, at: float = 1.0, job: str = "job") -> HostIsolated:
    return HostIsolated(host=host, at=at, source=f"{job}#{number}", by=job, reason="XID 79")


def broke(host: str, number: int, message: str = "it is gone") -> HostFault:
    return HostFault(
        host=host,
        at=float(number),
        source=f"job#{number}",
        job_id="job",
        kind=FaultKind.NODE_LOST,
        message=message,
    )


def lines(cluster: Simulated) -> list[str]:
    return list(cluster.get(f"{MAPS}/{HOSTS}")["data"]["hosts.jsonl"].splitlines())


def test_an_event_is_noted_once(api: Api, log: ClusterHostLog, cluster: Simulated) -> None:
    """The log has an event once, even if two processes append it; a repeated release is dropped."""
    assert log.hosts() == {}
    for each in (log, ClusterHostLog(api, "default")):
        each.append(isolated("a"))
        each.append(HostReleased(host="b", at=5.0, by="me"))
    assert len(lines(cluster)) == 2
    assert log.hosts()["a"].isolated == "XID 79"
    assert ClusterHostLog(api, "other").hosts() == {}


def test_it_bears_our_labels(log: ClusterHostLog, cluster: Simulated) -> None:
    """The ConfigMap has no label of a job, so that it remains when a job is removed."""
    log.append(isolated("a"))
    assert cluster.get(f"{MAPS}/{HOSTS}")["metadata"]["labels"] == {"rekindle.dev/role": "hosts"}


def test_any_number_write_at_once(log: ClusterHostLog, cluster: Simulated) -> None:
    """Six simultaneous writers lose no event and write none twice."""
    errors: list[Exception] = []

    def write(writer: int) -> None:
        own = load(str(cluster.kubeconfig))
        try:
            for number in range(5):
                ClusterHostLog(own, "default").append(isolated(f"h{writer}", 10 * writer + number))
                ClusterHostLog(own, "default").append(isolated("all", number, job="shared"))
        except JobError as error:
            errors.append(error)
        finally:
            own.close()

    threads = [threading.Thread(target=write, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(lines(cluster)) == len(set(lines(cluster))) == 6 * 5 + 5


def test_a_full_log_is_folded(
    log: ClusterHostLog, cluster: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full log is folded: isolations remain, and repeated old events are still recognised."""
    monkeypatch.setattr(host_log, "MOST_BYTES", 4000)
    log.append(isolated("bad", 0))
    log.append(isolated("good", 1))
    log.append(HostReleased(host="good", at=2.0, by="me"))
    later = [broke(f"h{number}", number) for number in range(3, 60)]
    for event in later:
        log.append(event)
    assert len("\n".join(lines(cluster))) <= 4000
    for event in (isolated("bad", 0), isolated("good", 1), *later):
        log.append(event)
    assert log.hosts()["bad"].isolated
    assert "good" not in log.hosts()
    log.append(isolated("good", 70, at=59.0))  # a later event at the same time as the last one
    assert log.hosts()["good"].isolated
    log.append(isolated("good", 1, at=500.0, job="other"))
    assert log.hosts()["good"].isolated_at == 500.0


def test_the_limit_is_below_that_of_the_server(log: ClusterHostLog, cluster: Simulated) -> None:
    """The log stays below the server's size limit, for messages of any length.

    Folding removes the oldest faults, even if all are recent.
    """
    text, now = "\N{SNOWMAN}" * 5000, int(time.time())
    many = [broke(f"h{n}", now - 9000 + n, text[:300]) for n in range(9000)]
    body, size = [], 0
    for event in many:
        body.append(msgspec.json.encode(event).decode() + "\n")
        size += len(body[-1].encode())
        if size > MOST_BYTES - 1500:
            break
    log.append(isolated("first"))
    cluster.patch(
        f"{MAPS}/{HOSTS}", {"data": {"hosts.jsonl": lines(cluster)[0] + "\n" + "".join(body)}}
    )
    for number in range(3):
        log.append(broke("sick", now + number, text))
    known = log.hosts()
    assert len(known["sick"].faults) == 3
    assert all(len(fault.message) == 300 for fault in known["sick"].faults)
    assert known["first"].isolated
    assert "h0" not in known
    assert len("\n".join(lines(cluster)).encode()) <= MOST_BYTES // 2 + 1500


def test_a_full_log_keeps_what_parts_have_taken_at_best(
    log: ClusterHostLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folding removes newer checks except the newest one.

    The log keeps the best times, so that it shows a host that gets slower gradually.
    """
    monkeypatch.setattr(host_log, "MOST_BYTES", 3000)
    for number in range(60):
        check = HostChecked(
            host="a",
            at=float(number),
            source=f"job#{number}",
            health=Health.HEALTHY,
            seconds={Measurement.COMPUTE: 1.01**number},
        )
        log.append(check)
    host = log.hosts()["a"]
    assert len(host.checks) < 20
    assert host.checked() == f"healthy, compute {1.01**59:.2f}x"


def test_too_many_isolated_hosts(log: ClusterHostLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the isolated hosts alone fill the log, an append is an error and no host is dropped."""
    for number in range(4):
        log.append(isolated(f"h{number}", number))
    monkeypatch.setattr(host_log, "MOST_BYTES", 400)
    with pytest.raises(JobError, match="full, because 5 hosts are isolated"):
        log.append(isolated("h4", 4))
    assert log.hosts()["h0"].isolated


@pytest.mark.parametrize("data", [{"hosts.jsonl": "{}\n{}\n"}, {"positions.json": "["}])
def test_what_is_no_log_is_named(
    data: dict[str, str], log: ClusterHostLog, cluster: Simulated
) -> None:
    log.append(isolated("a"))
    cluster.patch(f"{MAPS}/{HOSTS}", {"data": data})
    with pytest.raises(
        JobError, match=f"ConfigMap {HOSTS} in namespace default.*correct or remove"
    ):
        log.append(isolated("b", 1))


def test_a_log_without_content(log: ClusterHostLog, cluster: Simulated) -> None:
    """A log works with a ConfigMap that has no data."""
    metadata = {"name": HOSTS}
    cluster.create(MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    log.append(isolated("a"))
    assert log.hosts()["a"].isolated


def test_who_may_not_write_keeps_it_for_itself(cluster: Simulated, tmp_path: Path) -> None:
    """Without the right to write, events stay in the file of the machine.

    The error and the choice of hosts both report this, and training continues.
    """
    token = cluster.token_for("stranger")
    api = load(str(cluster.kubeconfig_for(token, tmp_path / "config")))
    hosts, texts = Hosts(api, PODS, tmp_path), list[str]()
    hosts.tell = texts.append
    with pytest.raises(
        JobError, match=r"recorded the event of a only on this machine: .*cannot get"
    ):
        hosts.note(isolated("a"))
    assert HostLog(tmp_path).hosts()["a"].isolated
    assert hosts.isolated() == ("a",)
    assert "Rekindle does not know which hosts other machines have isolated" in texts[0]
    api.close()


def test_one_machine_tells_the_others(api: Api, cluster: Simulated, tmp_path: Path) -> None:
    """All machines share the cluster's log, without a copy in a local file.

    A release applies to all machines.
    """
    here, elsewhere = Hosts(api, PODS, tmp_path / "a"), Hosts(api, PODS, tmp_path / "b")
    messages: list[str] = []
    here.tell = elsewhere.tell = messages.append
    here.note(isolated("a"))
    assert elsewhere.isolated() == ("a",)
    ClusterHostLog(api, "default").append(HostReleased(host="a", at=2.0, by="me"))
    assert here.isolated() == elsewhere.isolated() == ()
    assert messages == []
    assert not HostLog(tmp_path / "a").hosts()


def test_what_was_said_last_counts(api: Api, tmp_path: Path) -> None:
    """The last event counts: a release in the cluster frees a host isolated on this machine only.

    A later local event isolates the host again.
    """
    hosts = Hosts(api, PODS, tmp_path)
    HostLog(tmp_path).append(isolated("a"))
    ClusterHostLog(api, "default").append(HostReleased(host="a", at=2.0, by="me"))
    assert hosts.isolated() == ()
    HostLog(tmp_path).append(msgspec.structs.replace(isolated("a"), at=3.0))
    assert hosts.isolated() == ("a",)
