"""Measure a thousand pods: a flow process's API requests, and the reaction time to a lost pod.

The coordinator is the product's own process. Its agents are simulated (`_scale_agents.py`). The API
server is the one of the tests, which keeps all objects in one Python process: a real server answers
faster. Its kubelet is stopped, and this script sets the pods' status. In each round a pod is
evicted: its agent's connection is cut, and its status gives the reason.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from _common import HERE, ROOT, Conditions, finish, number, options, place, table
from _scale_agents import address_of
from coordinator_scale import Coordinator, Crowd, Run

from rekindle.engines.client import JobClient
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.placement.placement import Placement
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.protocol.heartbeat_page import beat_interval
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal.journal import AnyEvent, Decided, FaultSeen

sys.path.insert(0, str(ROOT / "tests"))
from cluster.launch import Simulated, start

PODS = "/api/v1/namespaces/default/pods"
TARGET_MS, TARGET_MB = 1000.0, 200.0
LIMIT_S = 300.0
NEVER_S = 10_000_000  # the grace time of the node, whose kubelet is stopped
READY = [{"type": "Ready", "status": "True"}]


def main() -> None:
    """Measure, print and write the figures."""
    parser = options(__doc__.partition("\n")[0])
    parser.add_argument("--pods", type=int, metavar="N", help="default: 1000; quick: 200")
    parser.add_argument(
        "--window", type=float, help="seconds without a fault (default: 60, quick: 5)"
    )
    args = parser.parse_args()
    pods = args.pods or (200 if args.quick else 1000)
    window_s = args.window or (5.0 if args.quick else 60.0)
    rounds = 3 if args.quick else 10
    conditions = Conditions()
    with place() as folder, ExitStack() as stack:
        cluster = stack.enter_context(
            start(
                folder / "cluster", node_grace=NEVER_S, nodes=1, capacity="pods=100000,cpu=100000"
            )
        )
        cluster.kill_kubelet()
        job = stack.enter_context(Coordinator(folder, pods))
        run = Run(agents=pods, window_s=window_s, beat_s=beat_interval(pods), rounds=rounds)
        crowd = stack.enter_context(Crowd(run, job))
        crowd.regrouped()
        crowd.step()
        began = time.monotonic()
        _place(cluster, job, pods)
        print(f"{pods} pods run after {time.monotonic() - began:.1f} s", flush=True)
        trial = Trial(folder, cluster, job, crowd, pods)
        ours = trial.measure("engine", window_s, rounds)
        peer = trial.measure("poll", window_s, rounds)
    _show(ours, peer)
    result: dict[str, Any] = {
        "pods": pods,
        **ours,
        "poll": peer,
        "poll_over_reason": round(peer["reason_ms"] / ours["reason_ms"], 1),
        "poll_over_memory": round(peer["memory_mb"] / ours["memory_mb"], 2),
    }
    finish(result, conditions, args.json)


def _place(cluster: Simulated, job: Coordinator, pods: int) -> None:
    """Let the engine place the job's workload, and set its pods to running."""
    described = KubernetesSettings(image="none", cpu="1m", memory="1Mi")
    job.directory.pods.write_bytes(msgspec.json.encode(described))
    api = load(str(cluster.kubeconfig))
    placing = Placement(job.directory, described, api, Hosts(api, described, job.directory.path))
    placing.place(placing.around(0))
    api.close()
    running: set[str] = set()
    deadline = time.monotonic() + LIMIT_S
    while len(running) < pods:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(running)} of {pods} pods were made in {LIMIT_S:g} s")
        for pod in _workers(cluster):
            if pod["metadata"]["name"] not in running and pod["spec"].get("nodeName"):
                running.add(pod["metadata"]["name"])
                _run(cluster, pod)
        time.sleep(0.2)


def _workers(cluster: Simulated) -> list[dict[str, Any]]:
    return list(cluster.get(f"{PODS}?labelSelector=rekindle.dev/role=worker")["items"])


def _run(cluster: Simulated, pod: dict[str, Any]) -> None:
    index = int(pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"])
    running = {"name": "training", "state": {"running": {}}, "ready": True, "restartCount": 0}
    running |= {"image": "none", "imageID": "none"}
    status = {"phase": "Running", "podIP": address_of(index), "conditions": READY}
    _tell(cluster, pod, status | {"containerStatuses": [running]})


def _tell(cluster: Simulated, pod: dict[str, Any], status: dict[str, Any]) -> None:
    cluster.patch(f"{PODS}/{pod['metadata']['name']}/status", {"status": status})


class Trial:
    """One way to watch pods, with its cluster and job."""

    def __init__(
        self, folder: Path, cluster: Simulated, job: Coordinator, crowd: Crowd, pods: int
    ) -> None:
        self._folder = folder
        self._cluster = cluster
        self._job = job
        self._crowd = crowd
        self._pods = pods
        self._broken = 0

    def measure(self, how: str, window_s: float, rounds: int) -> dict[str, Any]:
        """Watch for some time, evict some pods, and return the times, memory and API calls."""
        command = [sys.executable, str(HERE / "_pods_watcher.py"), how]
        command += [str(self._cluster.kubeconfig), str(self._job.directory.path), str(self._pods)]
        watcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert watcher.stdout is not None
        assert watcher.stdin is not None
        assert watcher.stdout.readline() == "ready\n", f"{how} has ended"
        since = time.time()
        time.sleep(window_s)
        calls = self._calls(since)
        seen = [self._evict() for _ in range(rounds)]
        watcher.stdin.close()
        memory_mb = float(watcher.stdout.readline())
        watcher.wait()
        return {
            "decision_ms": round(statistics.median(each[0] for each in seen), 1),
            "reason_ms": round(statistics.median(each[1] for each in seen), 1),
            "reason_max_ms": round(max(each[1] for each in seen), 1),
            "memory_mb": memory_mb,
            "api_calls_per_minute": round(calls / window_s * 60, 1),
        }

    def _calls(self, since: float) -> int:
        """Return how often the pods and the workload were requested since then."""
        counts = self._cluster.counts(since)
        return sum(n for told in counts.values() for what, n in told.items() if _is_look(what))

    def _evict(self) -> tuple[float, float]:
        """Evict a pod; return the milliseconds to the decision, and to its journalled reason."""
        number, self._broken = self._broken, self._broken + 1
        pod = next(
            p for p in _workers(self._cluster) if p["status"].get("podIP") == address_of(number)
        )
        known = len(self._history())
        at = time.time()
        self._crowd.tell("cut", number)
        _tell(self._cluster, pod, {"phase": "Failed", "reason": "Evicted", "message": "memory"})
        self._crowd.regrouped()
        self._crowd.step()
        decided = self._wait(known, lambda event: isinstance(event, Decided))
        told = self._wait(known, _is_eviction)
        return (decided - at) * 1000, (told - at) * 1000

    def _history(self) -> list[AnyEvent]:
        endpoint = self._job.directory.endpoint()
        assert endpoint is not None
        return JobClient(endpoint, self._job.directory.secret()).history()

    def _wait(self, known: int, is_it: Any) -> float:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            found = next((event for event in self._history()[known:] if is_it(event)), None)
            if found is not None:
                return float(found.at)
            time.sleep(0.05)
        raise SystemExit(f"the coordinator has heard of nothing in {LIMIT_S:g} s")


def _is_eviction(event: AnyEvent) -> bool:
    return isinstance(event, FaultSeen) and event.fault.kind is FaultKind.EVICTION


def _is_look(what: str) -> bool:
    verb, _, resource = what.partition(" ")
    return verb in ("get", "list", "watch") and resource in ("pods", "jobs.batch")


def _show(ours: dict[str, Any], peer: dict[str, Any]) -> None:
    rows = [
        (title, number(ours[key]), number(peer[key]), target)
        for title, key, target in (
            ("pod lost to decision, ms", "decision_ms", number(TARGET_MS)),
            ("its reason in the incident, ms", "reason_ms", number(TARGET_MS)),
            ("the slowest, ms", "reason_max_ms", "-"),
            ("memory of the process, MB", "memory_mb", number(TARGET_MB)),
            ("looks at the API per minute", "api_calls_per_minute", "-"),
        )
    ]
    table(("", "Rekindle", "list every 2 s", "target"), rows)


if __name__ == "__main__":
    main()
