"""What the engine asks of an API server, as rights: the one list of them. Pure.

deploy/base/role.yaml hands them out; the tests hold the two, and a job's requests, to each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Object
from rekindle.engines.kubernetes.client.objects import plural_of
from rekindle.engines.kubernetes.manifests.render import Manifests, adapter
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """To do these things with one resource.

    resource: with its subresource, as pods/log. without: what is not possible without it; "": a
    job. everywhere: it is none of a namespace.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    without: str = ""
    everywhere: bool = False

    @property
    def named(self) -> str:
        """The resource and its group, as kubectl has them."""
        return named(self.group, self.resource)


# Nodes are of no namespace: a ClusterRole hands this out, for who wants it.
NODES = Right(
    group="",
    resource="nodes",
    verbs=("get", "list", "watch", "patch"),
    without="nodes cannot be cordoned or tainted; jobs keep off them by affinity all the same",
    everywhere=True,
)

# For dry runs alone: controllers create the pods of jobs. The Role of deploy/ does not grant it.
PODS = Right(
    group="",
    resource="pods",
    verbs=("create",),
    without="only the run shows whether quotas, limits and webhooks let them in",
)


def needed(kind: WorkloadKind, wanted: Manifests, *, inside: bool = False) -> tuple[Right, ...]:
    """Return what a job of these objects cannot do without.

    inside: whoever steers it is a pod of the cluster, and reaches its coordinator directly.
    """
    secret, *others = wanted.around
    verbs: dict[tuple[str, str], dict[str, None]] = {}

    def ask(group: str, resource: str, *asked: str) -> None:
        verbs.setdefault((group, resource), {}).update(dict.fromkeys(asked))

    # The root is deleted, and all that it owns goes with it.
    ask(*place(wanted.root), "create", "get", "delete")
    ask(*place(secret), "create", "get")
    for each in (*others, *wanted.beside):
        ask(*place(each), "create", "patch")  # applied
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
    """Yield what is handed out besides: a job does without it."""
    gvk = adapter(kind).gvk
    for group, resource, verbs, without in (
        (gvk.group, gvk.plural, ("list", "watch"), "workloads cannot be followed"),
        ("", "configmaps", ("list", "watch", "patch"), "jobs cannot be listed, nor told anything"),
        ("", "pods", ("get",), "a single pod cannot be looked at"),
        ("", "pods/log", ("get",), "the output of pods cannot be read"),
        ("", "events", ("list", "watch"), "the log does not say why pods are not let in"),
        ("", "persistentvolumeclaims", ("get",), "a claim that is not there is not told before"),
        ("", "serviceaccounts", ("get",), "an account that is not there is not told before"),
    ):
        yield Right(group=group, resource=resource, verbs=verbs, without=without)


def place(obj: Object) -> tuple[str, str]:
    """Return the group and the resource that rights to an object name."""
    return obj["apiVersion"].rpartition("/")[0], plural_of(obj)


def named(group: str, resource: str) -> str:
    """Return a resource as kubectl has it."""
    return f"{resource}.{group}" if group else resource
