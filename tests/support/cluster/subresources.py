"""Subresources with special verbs: binding, eviction, logs, tokens and reviews."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import aiohttp
from aiohttp import web

from cluster import access, clock, deleting, kinds, refusals
from cluster.access import User, Users
from cluster.operations import Operations, ends
from cluster.refusals import Object, Refused
from cluster.rest import answer, body_object
from cluster.targets import Target
from cluster.watching import Line


def bind(operations: Operations, pod: Object, node: str) -> None:
    """Assign a pod to a node.

    Raises Refused: the pod already has a node (409).
    """

    def how(thing: Object) -> None:
        thing["spec"]["nodeName"] = node
        set_condition(thing, {"type": "PodScheduled", "status": "True"})

    if pod["spec"].get("nodeName"):
        why = (
            f'pod {pod["metadata"]["name"]} is already assigned to node "{pod["spec"]["nodeName"]}"'
        )
        raise refusals.conflict(kinds.PODS, pod["metadata"]["name"], why)
    operations.edit(kinds.PODS, pod, how)


def set_condition(thing: Object, condition: Object) -> None:
    """Replace the condition of this type. Keep its transition time if its status stays."""
    conditions = thing.setdefault("status", {}).setdefault("conditions", [])
    new = {"lastTransitionTime": clock.stamp(), **condition}
    for place, old in enumerate(conditions):
        if old["type"] == condition["type"]:
            if old["status"] == condition["status"]:
                new["lastTransitionTime"] = old.get("lastTransitionTime", clock.stamp())
            conditions[place] = new
            return
    conditions.append(new)


def disrupt(operations: Operations, pod: Object, reason: str, message: str) -> None:
    """Set the condition that marks the end of a pod as a disruption, not as its own failure."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    operations.edit(kinds.PODS, pod, lambda thing: set_condition(thing, condition))


async def binding(operations: Operations, request: web.Request, target: Target) -> web.Response:
    wanted = await body_object(request)
    pod = operations.get(kinds.PODS, target.namespace, target.name)
    bind(operations, pod, wanted["target"]["name"])
    return answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}, 201)


async def evict(operations: Operations, request: web.Request, target: Target) -> web.Response:
    wanted = await body_object(request)
    pod = operations.get(kinds.PODS, target.namespace, target.name)
    options = deleting.DeleteOptions.read(wanted.get("deleteOptions") or {}, request.query)
    if options.uid and options.uid != pod["metadata"]["uid"]:
        raise refusals.conflict(kinds.PODS, target.name, "Precondition failed: UID in precondition")
    if not options.dry_run:
        disrupt(operations, pod, "EvictionByEvictionAPI", "Eviction API: evicting")
    deleting.delete(operations, kinds.PODS, target.namespace, target.name, options)
    return answer({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}, 201)


async def token(
    operations: Operations, users: Users, request: web.Request, target: Target
) -> web.Response:
    wanted = await body_object(request)
    account = operations.get(kinds.SERVICEACCOUNTS, target.namespace, target.name)
    seconds = (wanted.get("spec") or {}).get("expirationSeconds", 3600)
    status = {"token": users.issue(account), "expirationTimestamp": ends(seconds)}
    made = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "status": status}
    metadata = {"name": target.name, "namespace": target.namespace}
    return answer({**made, "metadata": metadata, "spec": wanted.get("spec") or {}}, 201)


def who(user: User) -> web.Response:
    """Answer a SelfSubjectReview: name and groups of the user."""
    status = {"userInfo": {"username": user.name, "groups": list(user.groups)}}
    made = {"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1"}
    return answer({**made, "metadata": {}, "status": status}, 201)


async def review(operations: Operations, user: User, request: web.Request) -> web.Response:
    """Answer a SelfSubjectAccessReview: whether the user may do this."""
    wanted = await body_object(request)
    spec = wanted.get("spec") or {}
    attributes = spec.get("resourceAttributes")
    if attributes is not None:
        resource = attributes.get("resource", "")
        if attributes.get("subresource"):
            resource = f"{resource}/{attributes['subresource']}"
        asked = access.Request(
            verb=attributes.get("verb", ""),
            group=attributes.get("group", ""),
            resource=resource,
            namespace=attributes.get("namespace", ""),
            name=attributes.get("name", ""),
        )
    else:
        other = spec.get("nonResourceAttributes") or {}
        asked = access.Request(verb=other.get("verb", ""), path=other.get("path", ""))
    reason = access.allowed(operations.store, user, asked)
    status = {"allowed": reason is not None, **({"reason": reason} if reason else {})}
    made = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
    return answer({**made, "metadata": {}, "spec": spec, "status": status}, 201)


async def log(
    operations: Operations, session: aiohttp.ClientSession, request: web.Request, target: Target
) -> web.StreamResponse:
    """Stream a log from the kubelet of the pod's node."""
    pod = operations.get(kinds.PODS, target.namespace, target.name)
    container = _container(pod, request.query.get("container", ""))
    _check_started(pod, container, request.query.get("previous") in ("true", "True", "1"))
    node = operations.store.look(kinds.NODES, "", pod["spec"]["nodeName"])
    status: Object = (node or {}).get("status") or {}
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    address = next(
        (each["address"] for each in status.get("addresses") or [] if each["type"] == "InternalIP"),
        None,
    )
    path = f"/containerLogs/{target.namespace}/{target.name}/{container}"
    wanted = {name: value for name, value in request.query.items() if name != "container"}
    url = f"http://{address}:{port}{path}?{urlencode(wanted)}"
    line = Line(request, request.get("cut_after"))
    try:
        async with session.get(url) as found:
            if found.status != 200:
                raise refusals.bad_request(await found.text())
            await line.open("text/plain")
            async for data in found.content.iter_any():
                if not await line.send(data):
                    break
    except (aiohttp.ClientError, OSError) as error:
        if line.response.prepared:  # the node failed during the answer
            line.cut()
            return line.response
        message = f'Get "{url}": dial tcp {address}:{port}: {error}'
        raise Refused(500, "InternalError", message) from error
    return line.response


def _container(pod: Object, name: str) -> str:
    names = [each["name"] for each in pod["spec"]["containers"]]
    inits = [each["name"] for each in pod["spec"].get("initContainers") or []]
    title = pod["metadata"]["name"]
    if name:
        if name not in names + inits:
            raise refusals.bad_request(f"container {name} is not valid for pod {title}")
        return name
    if len(names) > 1:
        listed = " ".join(names)
        raise refusals.bad_request(
            f"a container name must be specified for pod {title}, choose one of: [{listed}]"
        )
    return str(names[0])


def _check_started(pod: Object, container: str, previous: bool) -> None:
    title = pod["metadata"]["name"]
    statuses: dict[str, Any] = {
        each["name"]: each
        for group in ("containerStatuses", "initContainerStatuses")
        for each in pod["status"].get(group) or []
    }
    found = statuses.get(container)
    if previous and (found is None or "terminated" not in (found.get("lastState") or {})):
        raise refusals.bad_request(
            f'previous terminated container "{container}" in pod "{title}" not found'
        )
    waiting = (
        (found or {}).get("state", {"waiting": {"reason": "ContainerCreating"}}).get("waiting")
    )
    started = found and "terminated" in (found.get("lastState") or {})
    if waiting and not started:
        raise refusals.bad_request(
            f'container "{container}" in pod "{title}" is waiting to start: {waiting["reason"]}'
        )
