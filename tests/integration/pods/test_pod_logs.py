"""The output of pods in files on the flow's machine: no line is lost, and few are repeated."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.launch import KUBELET, Simulated
from cluster.manifests import pod
from waiting import wait_until

from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.client.informer import Informer
from rekindle.engines.kubernetes.watchers import pod_logs
from rekindle.engines.kubernetes.watchers.log_stream import Runs
from rekindle.engines.kubernetes.watchers.pod_logs import PodLogs

pytestmark = pytest.mark.timeout(300)  # a cluster

Object = dict[str, Any]
PODS = "/api/v1/namespaces/default/pods"
COUNT = "i=0; while [ $i -lt {most} ]; do echo line $i; i=$((i+1)); sleep 0.02; done"

# Streams until SIGKILL, like a flow's process.
PROCESS = """
import sys
from pathlib import Path
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.client.informer import Informer
from rekindle.engines.kubernetes.watchers.pod_logs import PodLogs
api = load(sys.argv[1])
logs = PodLogs(api, Path(sys.argv[2]), sys.argv[3], "main")
with logs.open(print):
    for pod, there in Informer(api, sys.argv[3]).changes():
        logs.see(pod, there)
"""


class Reader:
    """Reads the output of all pods in a thread, as a job's engine does."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.folder = folder
        self.messages: list[str] = []
        self._api = load(str(kubeconfig), patience_s=20.0)
        self._follower = Informer(self._api, PODS)
        self.logs = PodLogs(self._api, folder, PODS, "main")

    @contextlib.contextmanager
    def open(self) -> Iterator[Reader]:
        def follow() -> None:
            for each, there in self._follower.changes():
                self.logs.see(each, there)

        thread = threading.Thread(target=follow)
        with self.logs.open(self.messages.append):
            thread.start()
            try:
                yield self
            finally:
                self._follower.end()
                thread.join()
        self._api.close()

    def lines(self, name: str) -> list[str]:
        return [line for text in self.files(name) for line in text]

    def files(self, name: str) -> list[list[str]]:
        """Return the output of each pod with this name, without times."""
        found = sorted(self.folder.glob(f"{name}-*.log"), key=lambda path: path.stat().st_mtime_ns)
        texts = (path.read_text() for path in found)
        return [[line.partition(" ")[2] for line in text.splitlines()] for text in texts]

    def wait(self, name: str, last: str) -> list[str]:
        wait_until(lambda: last in self.lines(name), f"{last} of {name}", 60)
        return self.lines(name)


@pytest.fixture
def reader(cluster: Simulated, tmp_path: Path) -> Iterator[Reader]:
    with Reader(cluster.kubeconfig, tmp_path / "logs").open() as found:
        yield found
    clear(cluster)


def clear(cluster: Simulated) -> None:
    cluster.clear_faults()
    for each in cluster.get(PODS)["items"]:
        cluster.call("DELETE", f"{PODS}/{each['metadata']['name']}?gracePeriodSeconds=0")
    cluster.until(PODS, lambda found: not found)


def run(cluster: Simulated, name: str, script: str, restart: str = "Never") -> None:
    thing = pod(name, script)
    thing["spec"]["restartPolicy"] = restart
    cluster.create(PODS, thing)


def was_read(cluster: Simulated) -> bool:
    """Return whether a client has requested the output of a pod."""
    return "get pods/log" in [f"{call['verb']} {call['resource']}" for call in cluster.calls()]


def holds(lines: list[str], wanted: list[str], again: int) -> None:
    """Check that the wanted lines are there in order, with at most `again` more lines."""
    rest = iter(lines)
    assert [each for each in wanted if each not in rest] == [], lines
    assert len(lines) - len(wanted) <= again, lines


def count(most: int, begin: int = 0) -> list[str]:
    return [f"line {number}" for number in range(begin, most)]


def test_all_that_a_pod_puts_out(reader: Reader, cluster: Simulated) -> None:
    """The file has the output from before the first look, and a last line without a newline."""
    run(cluster, "one", f"{COUNT.format(most=30)}; printf 'no end'")
    assert reader.wait("one", "no end") == [*count(30), "no end"]


@pytest.mark.parametrize("breaks", ["server", "stream"])
def test_what_breaks_off_goes_on(breaks: str, reader: Reader, cluster: Simulated) -> None:
    if breaks == "stream":
        cluster.inject("get", "pods/log", count=4, cut=True, after=5)
        cluster.inject("get", "pods/log", count=2, code=500)
    run(cluster, "one", COUNT.format(most=150))
    reader.wait("one", "line 20")
    if breaks == "server":
        cluster.restart_server()
    holds(reader.wait("one", "line 149"), count(150), again=6)
    assert cluster.faults() == []
    assert reader.messages == []


def test_a_container_that_is_started_again(reader: Reader, cluster: Simulated) -> None:
    """The file has the output of all runs of a container; the server keeps only two."""
    script = f"{COUNT.format(most=10)}; echo end at `date +%N`; exit 1"
    run(cluster, "one", script, "OnFailure")
    wait_until(lambda: reader.lines("one").count("line 9") >= 4, "four runs", 60)
    lines = reader.lines("one")
    ends = list(dict.fromkeys(line for line in lines if "end" in line))[:3]
    wanted = [line for each in ends for line in (*count(10), each)]
    assert lines[:33] == wanted


@pytest.mark.parametrize("text", ["at once", "late"])
def test_it_is_started_again_while_the_server_is_away(
    text: str, reader: Reader, cluster: Simulated
) -> None:
    """A restart while the server is stopped does not lose the last output of the earlier run.

    In the case "late" the client reads while the server still reports the earlier run.
    """
    gate = reader.folder.parent / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.02; done"
    script = f"echo begin; {wait}; {COUNT.format(most=20)}; "
    script += f"if [ -e {gate}2 ]; then sleep 60; fi; touch {gate}2; exit 1"
    run(cluster, "one", script, "OnFailure")
    reader.wait("one", "begin")
    cluster.stop_server()
    gate.touch()
    wait_until(lambda: Path(f"{gate}2").exists(), "the end of the first run", 30)
    if text == "late":
        untold = {"verb": "patch", "resource": "pods/status", "user": KUBELET, "code": 503}
        cluster.start_server(**untold, count=1_000_000)
        wait_until(lambda: was_read(cluster), "who reads its output", 60)
        cluster.clear_faults()
    else:
        cluster.start_server()
    wait_until(lambda: reader.lines("one").count("line 19") >= 2, "both runs", 60)
    # The lines of the second run can come first.
    assert Counter(reader.lines("one")) == Counter(["begin", *count(20)] * 2)


def test_another_process_goes_on_after_a_restart(cluster: Simulated, tmp_path: Path) -> None:
    """Another process does not repeat the output of earlier runs."""
    gate = tmp_path / "gate"
    script = f"echo begin; if [ ! -e {gate}1 ]; then touch {gate}1; exit 1; fi; "
    script += f"while [ ! -e {gate}2 ]; do sleep 0.02; done; echo end; sleep 60"
    run(cluster, "one", script, "OnFailure")
    logs = tmp_path / "logs"
    with Reader(cluster.kubeconfig, logs).open() as found:
        wait_until(lambda: found.lines("one") == ["begin", "begin"], "both runs", 60)
    Path(f"{gate}2").touch()
    with Reader(cluster.kubeconfig, logs).open() as found:
        assert found.wait("one", "end") == ["begin", "begin", "end"]
    clear(cluster)


def test_the_output_of_the_previous_run_is_gone(cluster: Simulated, tmp_path: Path) -> None:
    """If the server no longer has the output of the earlier run, the next run's output follows."""
    gate = tmp_path / "gate"
    script = f"echo begin; if [ ! -e {gate} ]; then touch {gate}; exit 1; fi; sleep 60"
    run(cluster, "one", script, "OnFailure")
    cluster.until(PODS, lambda pods: Runs.of(pods["one"], "main").restarts == 1)
    cluster.inject("get", "pods/log", count=1, code=400)
    with Reader(cluster.kubeconfig, tmp_path / "logs").open() as found:
        assert found.wait("one", "begin") == ["begin"]
    assert cluster.faults() == []
    clear(cluster)


def test_another_pod_of_the_same_name(reader: Reader, cluster: Simulated) -> None:
    """Each pod of the same name has its own file."""
    run(cluster, "one", "echo first; exit 1")
    reader.wait("one", "first")
    cluster.call("DELETE", f"{PODS}/one?gracePeriodSeconds=0")
    cluster.until(PODS, lambda found: not found)
    run(cluster, "one", "echo second")
    reader.wait("one", "second")
    assert reader.files("one") == [["first"], ["second"]]


def test_its_process_is_killed_and_another_goes_on(cluster: Simulated, tmp_path: Path) -> None:
    """After three kills of the process the file has all lines.

    The next process writes a partial line again in full.
    """
    run(cluster, "one", COUNT.format(most=200))
    logs = tmp_path / "logs"
    command = [sys.executable, "-c", PROCESS, str(cluster.kubeconfig), str(logs), PODS]
    for text in ("line 5", "line 40", "line 80"):
        with subprocess.Popen(command) as process:
            last = Reader(cluster.kubeconfig, logs)
            last.wait("one", text)
            process.send_signal(signal.SIGKILL)
    with Reader(cluster.kubeconfig, logs).open() as found:
        holds(found.wait("one", "line 199"), count(200), again=3)
    clear(cluster)


def test_the_final_checkpoint_when_it_is_left(cluster: Simulated, tmp_path: Path) -> None:
    """The file has the output from before the end of the reader."""
    run(cluster, "one", "echo early; sleep 60")
    with Reader(cluster.kubeconfig, tmp_path / "logs").open() as found:
        found.wait("one", "early")
    assert found.lines("one") == ["early"]
    clear(cluster)


def test_more_pods_than_are_read(
    cluster: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit only the last lines of pods that end are kept.

    A waiting pod is read from its start when another pod ends.
    """
    monkeypatch.setattr(pod_logs, "MOST", 2)
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.02; done"
    with Reader(cluster.kubeconfig, tmp_path / "logs").open() as found:
        for number in range(2):
            run(cluster, f"first{number}", f"echo begin; {wait}; echo end")
            found.wait(f"first{number}", "begin")
        run(cluster, "failed", "seq 1 2000; exit 3")
        lines = found.wait("failed", "2000")
        assert lines == [str(number) for number in range(1501, 2001)]
        file = next((tmp_path / "logs").glob("failed-*"))
        wait_until(lambda: found.messages != [], "what is said", 10)
        assert found.messages == [f"the last lines of a pod that has ended are in {file}"]
        run(cluster, "later", "echo begin; sleep 60")
        cluster.until(PODS, lambda pods: pods["later"]["status"].get("phase") == "Running")
        assert found.lines("later") == []
        gate.touch()
        found.wait("later", "begin")
        assert found.lines("first0") == ["begin", "end"]
    clear(cluster)


def test_no_right_to_read(
    cluster: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the right to read output, one message reports that."""
    monkeypatch.setattr(pod_logs, "FORBIDDEN_S", 0.5)
    rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    cluster.call("POST", f"{rbac}/roles", {"metadata": {"name": "look"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "look", "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "look"}
    binding = {"metadata": {"name": "look"}, "subjects": [subject], "roleRef": role}
    cluster.call("POST", f"{rbac}/rolebindings", binding)
    config = cluster.kubeconfig_for(cluster.token_for("look"), tmp_path / "config")
    for number in range(2):
        run(cluster, f"p{number}", "echo a; sleep 60")
    with Reader(config, tmp_path / "logs").open() as found:
        wait_until(lambda: found.messages != [], "that it is said", 30)
        assert found.lines("p0") == []
    (message,) = found.messages
    assert message.startswith("Rekindle cannot store the output of pods: ")
    assert "pods/log" in message
    clear(cluster)
