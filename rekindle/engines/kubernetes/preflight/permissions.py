"""List the rights that the engine needs at an API server. Pure.

deploy/base/role.yaml grants them. Tests compare this list, the role, and the requests of a job.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.objects import plural_of
from rekindle.engines.kubernetes.manifests.render import Manifests, adapter
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """The right to use these verbs on one resource.

    resource: with its subresource, such as pods/log. without: the function that needs it; "": a job
    does. everywhere: the resource does not belong to a namespace.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    without: str = ""
    everywhere: bool = False

    @property
    def named(self) -> str:
        """Return the resource and its group in kubectl's format."""
        return named(self.group, self.resource)


# Nodes do not belong to a namespace. An optional ClusterRole grants this right.
NODES = Right(
    group="",
    resource="nodes",
    verbs=("get", "list", "watch", "patch"),
    without="Rekindle cannot cordon or taint nodes, but jobs still avoid them by affinity",
    everywhere=True,
)

# Only for dry runs: controllers create the pods of jobs. The Role of deploy/ does not grant it.
PODS = Right(
    group="",
    resource="pods",
    verbs=("create",),
    without="only the run shows whether quotas, limits and webhooks admit them",
)


def needed(kind: WorkloadKind, wanted: Manifests, *, inside: bool = False) -> tuple[Right, ...]:
    """Return the rights that a job of these objects requires.

    inside: the process that steers it is a pod of the cluster, and reaches its coordinator
    directly.
    """
    secret, *others = wanted.around
    verbs: dict[tuple[str, str], dict[str, None]] = {}

    def ask(group: str, resource: str, *asked: str) -> None:
        verbs.setdefault((group, resource), {}).update(dict.fromkeys(asked))

    # The engine deletes the root, and the cluster deletes the objects that the root owns.
    ask(*place(wanted.root), "create", "get", "delete")
    ask(*place(secret), "create", "get")
    for each in (*others, *wanted.beside):
        ask(*place(each), "create", "patch")  # by a server-side apply
    ask("apps", "deployments", "get")
    ask("", "services", "get")
    if not inside:
        ask("", "services/proxy", "create", "get")
    ask(*place(wanted.workload), "create", "get", "delete")
    if adapter(kind).suspend is not None or adapter(kind).follows:
        ask(*place(wanted.workload), "patch")
    ask("", "pods", "list", "watch", "delete", "deletecollection")
    return tuple(
        Right(group=group, resource=resource, verbs=tuple(asked))
        for (group, resource), asked in verbs.items()
    )


def useful(kind: WorkloadKind) -> Iterator[Right]:
    """Yield the optional rights of the role."""
    gvk = adapter(kind).gvk
    for group, resource, verbs, without in (
        (gvk.group, gvk.plural, ("list", "watch"), "Rekindle cannot watch workloads"),
        (
            "",
            "configmaps",
            ("list", "watch", "patch"),
            "Rekindle cannot list jobs, or switch their trace",
        ),
        ("", "pods", ("get",), "Rekindle cannot read a single pod"),
        ("", "pods/log", ("get",), "Rekindle cannot read the output of pods"),
        ("", "events", ("list", "watch"), "the log does not show why the cluster rejects pods"),
        ("", "persistentvolumeclaims", ("get",), "the check cannot report a missing claim"),
        ("", "serviceaccounts", ("get",), "the check cannot report a missing account"),
    ):
        yield Right(group=group, resource=resource, verbs=verbs, without=without)


def place(obj: Object) -> tuple[str, str]:
    """Return the group and the resource that rights to an object name."""
    return obj["apiVersion"].rpartition("/")[0], plural_of(obj)


def named(group: str, resource: str) -> str:
    """Return a resource in kubectl's format."""
    return f"{resource}.{group}" if group else resource
