"""Test Deployments, and requests to them through the proxy of the API server."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from cluster.manifests import pod_spec
from cluster.spaces import Space
from waiting import join, wait_set, wait_until

Object = dict[str, Any]

# The server returns each request as JSON. `/slow` sends two chunks and waits for a file before the
# second.
_SERVER = """
import http.server, json, os, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        request = {"method": self.command, "path": self.path, "body": body,
                "authorization": self.headers.get("Authorization"), "x": os.path.exists("closed")}
        if self.path.startswith("/slow"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (b"first", b"second"):
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(piece), piece))
                self.wfile.flush()
                while piece == b"first" and not os.path.exists("go"):
                    time.sleep(0.02)
            self.wfile.write(b"0\\r\\n\\r\\n")
            return
        if self.path == "/hold":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"4\\r\\nheld\\r\\n")
            self.connection.recv(1)
            open("closed", "w").close()
            return
        if self.path == "/go":
            open("go", "w").close()
        data = json.dumps(request).encode()
        self.send_response(418 if self.path == "/odd" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer
    def log_message(self, *_): pass

http.server.ThreadingHTTPServer((os.environ["IP"], 8080), Handler).serve_forever()
"""


@pytest.fixture
def service(space: Space) -> str:
    """Create a Deployment of one server, and return the path of its proxy."""
    spec = pod_spec()
    container = spec["containers"][0]
    container["command"] = ["python3", "-c", _SERVER]
    source = {"fieldRef": {"fieldPath": "status.podIP"}}
    container["env"] = [{"name": "IP", "valueFrom": source}]
    container["ports"] = [{"name": "web", "containerPort": 8080}]
    container["readinessProbe"] = {"tcpSocket": {"port": "web"}, "periodSeconds": 1}
    spec["restartPolicy"] = "Always"
    deployment = {
        "metadata": {"name": "d"},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"app": "d"}},
            "template": {"metadata": {"labels": {"app": "d"}}, "spec": spec},
        },
    }
    space.cluster.create(space.path("apps/v1", "deployments"), deployment)
    place = f"/api/v1/namespaces/{space.name}/services"
    ports = [{"name": "http", "port": 80, "targetPort": "web"}]
    wanted = {"metadata": {"name": "s"}, "spec": {"selector": {"app": "d"}, "ports": ports}}
    space.cluster.create(place, wanted)
    space.cluster.until(
        space.path("apps/v1", "deployments"),
        lambda found: (found["d"].get("status") or {}).get("availableReplicas") == 1,
    )
    return f"{place}/http:s:http/proxy"


def test_requests_pass(space: Space, service: str) -> None:
    """The proxy passes on method, path, query, body and status code, but not the credentials."""
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        body = None if method == "GET" else {"a": 1}
        code, request = space.cluster.call(method, f"{service}/a/b?c=d%20e", body)
        assert code == 200
        assert (request["method"], request["path"]) == (method, "/a/b?c=d%20e")
        assert request["authorization"] is None
        assert request["body"] == ("" if body is None else json.dumps(body))
    assert space.cluster.call("GET", f"{service}/odd")[0] == 418


def test_ports_by_number_and_name(space: Space, service: str) -> None:
    """The proxy accepts a port by number and by name, with and without a scheme.

    An unknown port gets 503, an unknown service 404.
    """
    place = service.removesuffix("/http:s:http/proxy")
    for name in ("s:80", "s:http", "http:s:80", "s"):
        assert space.cluster.call("GET", f"{place}/{name}/proxy/x")[0] == 200
    assert space.cluster.call("GET", f"{place}/s:81/proxy/x")[0] == 503
    assert space.cluster.call("GET", f"{place}/none:80/proxy/x")[0] == 404


def test_answers_are_streamed(space: Space, service: str) -> None:
    """The proxy passes on the first chunk of an answer before the second chunk exists."""
    pieces: list[bytes] = []
    first = threading.Event()

    def read() -> None:
        response = space.cluster._request(
            "GET", f"{service}/slow", None, "application/json", preload_content=False
        )
        for piece in response.stream(16):
            pieces.append(piece)
            first.set()
        response.release_conn()

    thread = threading.Thread(target=read)
    thread.start()
    wait_set(first)
    assert pieces == [b"first"]
    space.cluster.call("GET", f"{service}/go")
    join(thread)
    assert b"".join(pieces) == b"firstsecond"


def test_who_hangs_up_is_noticed(space: Space, service: str) -> None:
    """If a client closes its connection, the pod detects this through the proxy."""
    response = space.cluster._request(
        "GET", f"{service}/hold", None, "application/json", preload_content=False
    )
    pieces = response.stream(16)  # closing this iterator also closes the response
    assert next(pieces) == b"held"
    assert space.cluster.call("GET", f"{service}/x")[1]["x"] is False
    pieces.close()
    response.close()
    wait_until(lambda: space.cluster.call("GET", f"{service}/x")[1]["x"], "the end")


def test_a_dead_pod_is_replaced(space: Space, service: str) -> None:
    """A Deployment replaces a deleted pod, under another name, and its service works again."""
    gone = space.running(1)
    name = next(iter(gone))
    space.cluster.delete(f"{space.pods}/{name}", gracePeriodSeconds=0)
    found = space.running(1, besides=(gone[name]["metadata"]["uid"],))
    assert name not in found
    space.cluster.until(
        space.path("apps/v1", "deployments"),
        lambda found: (found["d"].get("status") or {}).get("availableReplicas") == 1,
    )
    assert space.cluster.call("GET", f"{service}/x")[0] == 200


def test_a_new_template_is_a_new_pod(space: Space, service: str) -> None:
    """A changed template replaces the pod. With no replicas, the proxy answers 503."""
    gone = space.running(1)
    path = space.path("apps/v1", "deployments") + "/d"
    annotations = {"metadata": {"annotations": {"again": "yes"}}}
    space.cluster.patch(path, {"spec": {"template": annotations}})
    found = space.running(1, besides=tuple(p["metadata"]["uid"] for p in gone.values()))
    assert next(iter(found.values()))["metadata"]["annotations"] == {"again": "yes"}
    space.cluster.patch(path, {"spec": {"replicas": 0}})
    space.cluster.until(space.pods, lambda found: not found)
    assert space.cluster.call("GET", f"{service}/x")[0] == 503
