"""The proxy to services and pods: `services/http:NAME:PORT/proxy/PATH`."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from cluster import kinds, refusals, selectors
from cluster.refusals import Object, Refused
from cluster.store import Store
from cluster.targets import Target

# The proxy does not forward these headers: they concern one connection, or only the server may see
# them.
_ENDS_HERE = {
    "authorization",
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}


async def proxy(
    store: Store, session: aiohttp.ClientSession, request: web.Request, target: Target
) -> web.StreamResponse:
    """Forward a request and stream the answer."""
    host, port = find(store, target)
    path = request.rel_url.raw_path.split("/proxy", 1)[1] or "/"
    query = f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""
    headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _ENDS_HERE]
    headers.append(("X-Forwarded-For", request.remote or ""))
    headers.append(("X-Forwarded-Uri", request.rel_url.raw_path))
    response: web.StreamResponse | None = None
    length = request.headers.get("Content-Length")
    if length is not None:
        headers.append(("Content-Length", length))
    try:
        async with session.request(
            request.method,
            aiohttp.client.URL(f"http://{host}:{port}{path}{query}", encoded=True),
            headers=headers,
            data=request.content.iter_any() if request.can_read_body else None,
            allow_redirects=False,
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
        ) as found:
            response = web.StreamResponse(status=found.status, reason=found.reason)
            for name, value in found.headers.items():
                if name.lower() not in _ENDS_HERE:
                    response.headers.add(name, value)
            if "Content-Length" in found.headers:
                response.headers["Content-Length"] = found.headers["Content-Length"]
            await response.prepare(request)
            async for data in found.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response
    except (aiohttp.ClientError, OSError) as error:
        if response is not None and response.prepared:
            if request.transport is not None:
                request.transport.abort()
            return response
        message = f"error trying to reach service: dial tcp {host}:{port}: {error}"
        raise Refused(503, "ServiceUnavailable", message) from error


def find(store: Store, target: Target) -> tuple[str, int]:
    """Return the address and port of a pod that can answer.

    Raises Refused: the service or pod is missing, or no pod is ready.
    """
    parts = target.name.split(":")
    if len(parts) == 3:
        parts = parts[1:]  # drops the scheme, which is always http
    name, port = parts[0], parts[1] if len(parts) > 1 else ""
    if target.kind is kinds.PODS:
        pod = store.look(kinds.PODS, target.namespace, name)
        if pod is None:
            raise refusals.not_found(kinds.PODS, name)
        address = (pod.get("status") or {}).get("podIP")
        if not address:
            raise refusals.bad_request(f'address not allowed: pod "{name}" has none')
        return address, int(port or _first_port(pod))
    service = store.look(kinds.SERVICES, target.namespace, name)
    if service is None:
        raise refusals.not_found(kinds.SERVICES, name)
    wanted = _service_port(service, name, port)
    for pod in backing(store, service):
        number = _target_port(pod, wanted)
        if number is not None:
            return pod["status"]["podIP"], number
    message = f'no endpoints available for service "{target.name}"'
    raise Refused(503, "ServiceUnavailable", message)


def backing(store: Store, service: Object) -> list[Object]:
    """Return the running pods of a service that have an address.

    Pods that are not ready are included only if the service publishes them.
    """
    selector = service["spec"].get("selector")
    if not selector:
        return []
    return [
        pod
        for pod in store.all(kinds.PODS, service["metadata"]["namespace"])
        if selectors.matches({"matchLabels": selector}, pod["metadata"].get("labels") or {})
        and pod["status"].get("podIP")
        and pod["status"].get("phase") == "Running"
        and (
            service["spec"].get("publishNotReadyAddresses")
            or ("deletionTimestamp" not in pod["metadata"] and is_ready(pod))
        )
    ]


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _service_port(service: Object, name: str, port: str) -> Object:
    ports: list[Object] = service["spec"].get("ports") or []
    for each in ports:
        if port in (each.get("name"), str(each.get("port"))) or (not port and len(ports) == 1):
            return each
    message = f'no service port "{port}" found for service "{name}"'
    raise Refused(503, "ServiceUnavailable", message)


def _target_port(pod: Object, port: Object) -> int | None:
    target = port.get("targetPort", port.get("port"))
    if isinstance(target, int) or str(target).isdigit():
        return int(target)
    for container in pod["spec"]["containers"]:
        for each in container.get("ports") or []:
            if each.get("name") == target:
                return int(each["containerPort"])
    return None


def _first_port(pod: Object) -> int:
    for container in pod["spec"]["containers"]:
        for each in container.get("ports") or []:
            return int(each["containerPort"])
    return 80
