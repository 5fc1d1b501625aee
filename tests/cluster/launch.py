"""Starts the server and the kubelet, and is a test's hold on them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import urllib3
import yaml

Object = dict[str, Any]

_KUBELET = "system:node:kubelet"
_TESTS = Path(__file__).parents[1]
# Faults are not for the kubelet, unless a test says so.
EVERYBODY_ELSE = f"(?!{_KUBELET}$).*"


class Unavailable(Exception):
    """A real cluster has nothing of the kind."""


class Cluster:
    """Any cluster, by its kubeconfig."""

    simulated = False
    time_scale = 1.0

    def __init__(self, kubeconfig: Path) -> None:
        from kubernetes import client, config

        self.kubeconfig = kubeconfig
        configuration = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self.server_url: str = configuration.host
        self.admin = client.ApiClient(configuration)

    def close(self) -> None:
        self.admin.close()
        self.admin.rest_client.pool_manager.clear()

    def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Code and answer of a plain request of the admin: `call("GET", "/api/v1/pods")`."""
        response = self._request(method, path, body, content_type)
        text = response.data.decode()
        with contextlib.suppress(ValueError):
            return response.status, json.loads(text)
        return response.status, text

    def get(self, path: str) -> Object:
        """It must be there."""
        code, found = self.call("GET", path)
        assert code == 200, found
        return dict(found)

    def create(self, path: str, thing: Object) -> Object:
        code, made = self.call("POST", path, thing)
        assert code == 201, made
        return dict(made)

    def patch(self, path: str, patch: Any) -> Object:
        """A merge patch, or a JSON patch if it is a list."""
        kind = "json" if isinstance(patch, list) else "merge"
        code, found = self.call("PATCH", path, patch, f"application/{kind}-patch+json")
        assert code == 200, found
        return dict(found)

    def delete(self, path: str, **options: Any) -> Any:
        code, found = self.call(
            "DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        )
        assert code in (200, 202), found
        return found

    def until(
        self,
        path: str,
        holds: Callable[[dict[str, Object]], Any],
        timeout: float = 30,
        selector: str = "",
    ) -> Any:
        """What holds says of the objects of a collection, by name, once that is something.

        It is asked after every change. A test fails if it takes longer than the timeout.
        """
        deadline = time.monotonic() + timeout
        found: dict[str, Object] = {}
        query = f"&labelSelector={selector}" if selector else ""
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                listed = self.get(f"{path}?{query}")
                found = {each["metadata"]["name"]: each for each in listed["items"]}
                if result := holds(found):
                    return result
                version = listed["metadata"]["resourceVersion"]
                left = max(1, int(deadline - time.monotonic()))
                url = f"{path}?watch=1&timeoutSeconds={left}&resourceVersion={version}{query}"
                for kind, thing in self._events(url, left):
                    if kind == "ERROR":
                        break
                    if kind == "DELETED":
                        found.pop(thing["metadata"]["name"], None)
                    else:
                        found[thing["metadata"]["name"]] = thing
                    if result := holds(found):
                        return result
        raise AssertionError(f"not within {timeout} s: {json.dumps(found, indent=1)[-6000:]}")

    def token_for(self, account: str, namespace: str = "default") -> str:
        """Of a service account; it is created if it is not there."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.call("POST", path, {"metadata": {"name": account}})
        made = self.create(
            f"{path}/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
        )
        return str(made["status"]["token"])

    def kubeconfig_for(self, token: str, path: Path, namespace: str = "default") -> Path:
        """A kubeconfig like its own, for another token."""
        told = yaml.safe_load(self.kubeconfig.read_text())
        told["users"] = [{"name": "user", "user": {"token": token}}]
        for each in told["contexts"]:
            each["context"].update(user="user", namespace=namespace)
        path.write_text(yaml.safe_dump(told))
        return path

    def scaled(self, seconds: float) -> float:
        """So long does it take here what takes so many seconds in a real cluster."""
        return seconds * self.time_scale

    def _request(self, method: str, path: str, body: Any, content_type: str, **more: Any) -> Any:
        configuration = self.admin.configuration
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if token := configuration.get_api_key_with_prefix("BearerToken", alias="authorization"):
            headers["Authorization"] = token
        return self.admin.rest_client.pool_manager.request(
            method,
            self.server_url + path,
            body=None if body is None else json.dumps(body),
            headers=headers,
            retries=False,
            **more,
        )

    def _events(self, path: str, timeout: float) -> Iterator[tuple[str, Object]]:
        limit = urllib3.Timeout(connect=5, read=timeout + 5)
        response = self._request(
            "GET", path, None, "application/json", preload_content=False, timeout=limit
        )
        rest = b""
        try:
            for data in response.stream(None, decode_content=False):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]
        finally:
            response.close()
            response.release_conn()


class Simulated(Cluster):
    """The one of this package, with all that a test may do to it."""

    simulated = True

    def __init__(self, folder: Path, time_scale: float, options: Object) -> None:
        self.folder = folder
        self.root = folder / "kubelet"
        self.time_scale = time_scale
        self._options = options
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", _KUBELET)}
        lines = [f'{token},{name},{name},"system:masters"' for name, token in self._tokens.items()]
        (folder / "tokens").write_text("\n".join(lines) + "\n")
        self._server = self._start_server(0)
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(_kubeconfig(f"http://127.0.0.1:{self.port}", self._tokens["admin"]))
        super().__init__(kubeconfig)
        self._kubelet = self._start_kubelet()

    @property
    def port(self) -> int:
        return int((self.folder / "port").read_text())

    def close(self) -> None:
        super().close()
        for process in (self._kubelet, self._server):
            process.terminate()
        for process in (self._kubelet, self._server):
            _await_end(process)

    def stop_server(self) -> None:
        """Killed, as by a fault."""
        self._server.kill()
        self._server.wait()

    def start_server(self, deny_for: float = 0.0) -> None:
        """On its port, with the objects that it had; deny_for: seconds of 403 at first."""
        self._server = self._start_server(self.port, "--deny-for", str(deny_for))

    def restart_server(self, deny_for: float = 0.0) -> None:
        self.stop_server()
        self.start_server(deny_for)

    def kill_node(self, name: str) -> None:
        """Its processes are killed, and it says nothing any more."""
        self._order(name, "crash")

    def revive_node(self, name: str) -> None:
        self._order(name, "back")

    def inject(self, verb: str = ".*", resource: str = ".*", **fault: Any) -> None:
        """The next `count` requests that match meet a fault.

        code (with retry_after), delay in seconds, cut (of a watch or log: after so many pieces).
        verb and resource are regular expressions of the whole: `list|watch`, `pods(/log)?`,
        `jobs.batch`.
        """
        wanted = {"verb": verb, "resource": resource, "user": EVERYBODY_ELSE, **fault}
        code, answer = self.call("POST", "/test/faults", wanted)
        assert code == 200, answer

    def faults(self) -> list[Object]:
        """Those that no request has met yet."""
        return list(self.call("GET", "/test/faults")[1])

    def clear_faults(self) -> None:
        self.call("DELETE", "/test/faults")

    def compact(self) -> None:
        """No watch can begin before now."""
        self.call("POST", "/test/compact", {})

    def cut(self, resource: str = ".*") -> int:
        """Cut the watches of these resources; how many there were."""
        return int(self.call("POST", "/test/cut", {"resource": resource})[1]["cut"])

    def calls(self, since: float = 0.0, user: str = "") -> list[Object]:
        """What was asked of the server, but by the kubelet. since: as time.time() has it."""
        found = self.call("GET", f"/test/requests?since={since}")[1]["calls"]
        return [each for each in found if each["user"] != _KUBELET and user in ("", each["user"])]

    def counts(self, since: float = 0.0) -> dict[str, dict[str, int]]:
        """How often what was asked, by user: {"admin": {"list pods": 3}}."""
        return dict(self.call("GET", f"/test/requests?since={since}")[1]["counts"])

    def _order(self, node: str, what: str) -> None:
        port = (self.folder / "kubelet-port").read_text()
        response = self.admin.rest_client.pool_manager.request(
            "POST", f"http://127.0.0.1:{port}/nodes/{node}/{what}", retries=False
        )
        assert response.status == 200, response.data

    def _start_server(self, port: int, *more: str) -> subprocess.Popen[bytes]:
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        grace = self._options.get("node_grace", max(2.0, 40 * self.time_scale))
        command = ["cluster.server", "--state", self.folder / "state", "--port", port]
        command += ["--tokens", self.folder / "tokens", "--port-file", port_file]
        command += ["--time-scale", self.time_scale, "--node-grace", grace]
        command += ["--without", self._options.get("without", "")]
        command += ["--gates", self._options.get("gates", ""), *more]
        return self._start(command, port_file, "server.log")

    def _start_kubelet(self) -> subprocess.Popen[bytes]:
        port_file = self.folder / "kubelet-port"
        command = ["cluster.kubelet", "--server", f"http://127.0.0.1:{self.port}"]
        command += ["--token", self._tokens[_KUBELET], "--root", self.root]
        command += ["--nodes", self._options.get("nodes", 3), "--port-file", port_file]
        command += ["--time-scale", self.time_scale, "--beat", max(0.5, 10 * self.time_scale)]
        command += ["--capacity", self._options.get("capacity", "")]
        for text in self._options.get("labels", ()):
            command += ["--labels", text]
        return self._start(command, port_file, "kubelet.log")

    def _start(self, command: list[Any], ready: Path, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(_TESTS)},
            )
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None, (self.folder / log).read_text()
            assert time.monotonic() < deadline, (self.folder / log).read_text()
            time.sleep(0.02)
        return process


@contextlib.contextmanager
def start(folder: Path, *, time_scale: float = 0.05, **options: Any) -> Iterator[Simulated]:
    """A cluster of this package.

    options: nodes (3), labels (["zone=a", "node-0:disk=fast"]), capacity ("example.com/npu=8"),
    without ("jobsets,..."), gates ("RestartJob"), node_grace (seconds).
    """
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Simulated(folder, time_scale, options)
    try:
        yield cluster
    finally:
        cluster.close()


def _kubeconfig(server: str, token: str) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "admin", "namespace": "default"},
                }
            ],
        }
    )


def _await_end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise
