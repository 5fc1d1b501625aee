"""A namespace, with the words of tests that run jobs in it."""

from __future__ import annotations

from typing import Any

from cluster.client import Cluster

Object = dict[str, Any]

INDEX = "batch.kubernetes.io/job-completion-index"


class Space:
    """Paths in a namespace, and waits for what happens there."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.pods = f"/api/v1/namespaces/{name}/pods"
        self.jobs = self.path("batch/v1", "jobs")

    def path(self, group: str, plural: str) -> str:
        return f"/apis/{group}/namespaces/{self.name}/{plural}"

    def has(self, group: str) -> bool:
        """Whether the cluster knows kinds of that group and version."""
        return self.cluster.call("GET", f"/apis/{group}")[0] == 200

    def running(
        self, count: int = 3, besides: tuple[str, ...] = (), timeout: float = 30
    ) -> dict[str, Object]:
        """Pods by name, once so many run that are none of these uids."""

        def holds(found: dict[str, Object]) -> dict[str, Object] | None:
            them = {
                name: pod
                for name, pod in found.items()
                if pod["status"].get("phase") == "Running"
                and "deletionTimestamp" not in pod["metadata"]
                and pod["metadata"]["uid"] not in besides
            }
            return them if len(them) == count else None

        found: dict[str, Object] = self.cluster.until(self.pods, holds, timeout)
        return found

    def ranks(self, count: int = 3, besides: tuple[str, ...] = ()) -> dict[int, Object]:
        """The running pods of an Indexed Job, by index."""
        found = self.running(count, besides).values()
        return {int(pod["metadata"]["labels"][INDEX]): pod for pod in found}

    def condition(self, path: str, name: str, *kinds: str, timeout: float = 30) -> Object:
        """The first of these conditions of that object that is True."""

        def holds(found: dict[str, Object]) -> Object | None:
            for each in (found.get(name, {}).get("status") or {}).get("conditions") or []:
                if each["type"] in kinds and each["status"] == "True":
                    return dict(each)
            return None

        found: Object = self.cluster.until(path, holds, timeout)
        return found

    def status(self, path: str, name: str) -> Object:
        return dict(self.cluster.get(f"{path}/{name}")["status"])


def uids(pods: dict[Any, Object]) -> tuple[str, ...]:
    return tuple(pod["metadata"]["uid"] for pod in pods.values())
