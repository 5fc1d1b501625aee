"""Watch a job's pods in a separate process, and report to the job's coordinator.

With `engine`, it watches as a flow process does. With `poll`, it waits as Kubeflow's SDK waits for
a job: with the official client's typed list, every 2 s. It prints "ready" when it has seen all
pods, and its memory at the end, in MB.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from kubernetes import client, config

from rekindle.engines.client import JobClient
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.client.pod_status import PodStatus
from rekindle.engines.kubernetes.labels import selector
from rekindle.engines.kubernetes.manifests.settings import KubernetesSettings
from rekindle.engines.kubernetes.placement.placement import Placement
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.engines.kubernetes.watchers.job_watcher import JobWatcher
from rekindle.job.spec import JobDirectory
from rekindle.recovery.faults.classification import EventSource, HealthEvent

POLL_S = 2.0


class Watched(NamedTuple):
    """A job, and the function that gets its pods' events.

    nodes: by address. wanted: the number of pods.
    """

    kubeconfig: str
    job: JobDirectory
    report: Callable[[HealthEvent], None]
    nodes: dict[str, int]
    wanted: int


def main() -> None:
    """Watch until stdin ends."""
    how, kubeconfig, directory, wanted = sys.argv[1:]
    job = JobDirectory(Path(directory))
    endpoint = job.endpoint()
    assert endpoint is not None
    coordinator = JobClient(endpoint, job.secret())
    nodes = {
        event.address: event.node
        for event in coordinator.history()
        if getattr(event, "address", "") and event.node >= 0
    }
    watched = Watched(kubeconfig, job, coordinator.report, nodes, int(wanted))
    (_watch if how == "engine" else _poll)(watched)


def _memory_mb() -> float:
    return round(psutil.Process().memory_info().rss / 1e6, 1)


def _watch(watched: Watched) -> None:
    kubeconfig, job, report, nodes, wanted = watched

    def node_of(pod: PodStatus) -> int | None:
        return nodes.get(pod.ip)

    api = load(kubeconfig)
    pods = msgspec.json.decode(job.pods.read_bytes(), type=KubernetesSettings)
    placing = Placement(job, pods, api, Hosts(api, pods, job.path))
    watcher = JobWatcher(api, placing, job.spec().job_id, node_of, report, lambda text: None)
    with watcher.open(lambda pod, there: None):
        while len(watcher.pods() or ()) < wanted:
            time.sleep(0.05)
        print("ready", flush=True)
        sys.stdin.read()
        print(_memory_mb(), flush=True)


def _poll(watched: Watched) -> None:
    kubeconfig, job, report, nodes, wanted = watched
    config.load_kube_config(kubeconfig)
    core = client.CoreV1Api()
    told: set[str] = set()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    ready = False
    while not ended.wait(POLL_S if ready else 0.1):
        chosen = selector(job.spec().job_id)
        pods = core.list_namespaced_pod("default", label_selector=chosen).items
        if not ready and len(pods) >= wanted:
            ready = True
            print("ready", flush=True)
        for pod in pods:
            if pod.status.phase == "Failed" and pod.metadata.uid not in told:
                told.add(pod.metadata.uid)
                node = nodes[pod.status.pod_ip]
                what = pod.status.reason
                event = HealthEvent(source=EventSource.POD_REASON, what=what, node=node, by="poll")
                report(msgspec.structs.replace(event, address=pod.status.pod_ip))
    print(_memory_mb(), flush=True)


if __name__ == "__main__":
    main()
