"""A namespace, with helpers for tests that run jobs in it."""

from __future__ import annotations

from typing import Any

from cluster.client import Cluster

Object = dict[str, Any]

INDEX = "batch.kubernetes.io/job-completion-index"


class Space:
    """Paths in a namespace, and waits for changes of its objects."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.pods = f"/api/v1/namespaces/{name}/pods"
        self.jobs = self.path("batch/v1", "jobs")

    def path(self, group: str, plural: str) -> str:
        return f"/apis/{group}/namespaces/{self.name}/{plural}"

    def has(self, group: str) -> bool:
        """Return whether the cluster supports this group and version."""
        return self.cluster.call("GET", f"/apis/{group}")[0] == 200

    def running(
        self, count: int = 3, besides: tuple[str, ...] = (), timeout: float = 30
    ) -> dict[str, Object]:
        """Return the running pods by name, once there are `count` of them.

        `besides`: the uids of pods that do not count.
        """

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
        """Return the running pods of an Indexed Job by index."""
        found = self.running(count, besides).values()
        return {int(pod["metadata"]["labels"][INDEX]): pod for pod in found}

    def condition(self, path: str, name: str, *kinds: str, timeout: float = 30) -> Object:
        """Return the first of these conditions of an object that becomes True."""

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
