"""Start the server and the kubelet, and inject faults into them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from repository import SUPPORT
from waiting import bound_s, wait_until

from cluster.client import Cluster

Object = dict[str, Any]

KUBELET = "system:node:kubelet"
# Faults do not apply to the kubelet, unless a test requests it.
_END_S = 30.0  # for the end of all processes of pods
EVERYBODY_ELSE = f"(?!{KUBELET}$).*"


class Simulated(Cluster):
    """The simulated cluster, with the faults that a test can inject."""

    simulated = True

    def __init__(self, folder: Path, time_scale: float, options: Object) -> None:
        self.folder = folder
        self.root = folder / "kubelet"
        self.time_scale = time_scale
        self._options = options
        self._node_count = int(options.get("nodes", 3))
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", KUBELET)}
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
        _await_end(self._kubelet, self.folder / "kubelet.log")
        _await_end(self._server, self.folder / "server.log")

    def ensure_server(self) -> None:
        """Start the server if it is stopped."""
        if self._server.poll() is not None:
            self.start_server()

    def stop_server(self) -> None:
        """Kill the server with SIGKILL."""
        self._server.kill()
        self._server.wait()

    def start_server(self, deny_for: float = 0.0, **fault: Any) -> None:
        """Start the server on its previous port, with its previous objects.

        `deny_for`: the first seconds, in which the server answers 403 to all users except masters.
        `fault`: a fault as in `inject`, active from the first request.
        """
        more = ["--fault", json.dumps({"user": EVERYBODY_ELSE, **fault})] if fault else []
        self._server = self._start_server(self.port, "--deny-for", str(deny_for), *more)

    def restart_server(self, deny_for: float = 0.0) -> None:
        self.stop_server()
        self.start_server(deny_for)

    def complaints(self) -> str:
        """Return the logs of server and kubelet that contain a traceback; normally none."""
        logs = (self.folder / name for name in ("server.log", "kubelet.log"))
        return "".join(log.read_text() for log in logs if "Traceback" in log.read_text())

    def kill_kubelet(self) -> None:
        """Kill the kubelet and all processes of its pods. All nodes stop sending heartbeats."""
        self._kubelet.kill()
        self._kubelet.wait()

    def has_node(self, name: str) -> bool:
        """Return whether the kubelet runs a node of this name."""
        number = name.removeprefix("node-")
        return number.isdigit() and int(number) < self._node_count

    def kill_node(self, name: str) -> None:
        """Kill the processes of a node and stop its heartbeats."""
        self._order(name, "crash")

    def revive_node(self, name: str) -> None:
        self._order(name, "back")

    def inject(self, verb: str = ".*", resource: str = ".*", **fault: Any) -> None:
        """Let the next `count` matching requests meet a fault.

        `verb`, `resource`: regular expressions that match completely, for example `list|watch`,
        `pods(/log)?`, `jobs.batch`.
        `fault`: code (with retry_after), delay in seconds, or cut. A cut ends a watch or log after
        `after` pieces.
        """
        wanted = {"verb": verb, "resource": resource, "user": EVERYBODY_ELSE, **fault}
        code, answer = self.call("POST", "/test/faults", wanted)
        assert code == 200, answer

    def faults(self) -> list[Object]:
        """Return the faults that no request has met yet."""
        return list(self.call("GET", "/test/faults")[1])

    def clear_faults(self) -> None:
        self.call("DELETE", "/test/faults")

    def compact(self) -> None:
        """Drop old versions, so that no watch can start at a version before now."""
        self.call("POST", "/test/compact", {})

    def cut(self, resource: str = ".*") -> int:
        """Cut the watches of these resources and return their number."""
        return int(self.call("POST", "/test/cut", {"resource": resource})[1]["cut"])

    def calls(self, since: float = 0.0, user: str = "") -> list[Object]:
        """Return the requests to the server, without the requests of the kubelet.

        `since`: seconds, as returned by time.time().
        """
        found = self.call("GET", f"/test/requests?since={since}")[1]["calls"]
        return [each for each in found if each["user"] != KUBELET and user in ("", each["user"])]

    def counts(self, since: float = 0.0) -> dict[str, dict[str, int]]:
        """Return the number of requests by user, for example {"admin": {"list pods": 3}}."""
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
        command += ["--without", self._options.get("without", ""), *more]
        return self._start(command, port_file, "server.log")

    def _start_kubelet(self) -> subprocess.Popen[bytes]:
        port_file = self.folder / "kubelet-port"
        command = ["cluster.kubelet", "--server", f"http://127.0.0.1:{self.port}"]
        command += ["--token", self._tokens[KUBELET], "--root", self.root]
        command += ["--nodes", self._node_count, "--port-file", port_file]
        command += ["--time-scale", self.time_scale, "--beat", max(0.5, 10 * self.time_scale)]
        command += ["--late", bound_s(_END_S) / 2]
        command += ["--capacity", self._options.get("capacity", "")]
        for text in self._options.get("labels", ()):
            command += ["--labels", text]
        return self._start(command, port_file, "kubelet.log")

    def _start(self, command: list[Any], ready: Path, log: str) -> subprocess.Popen[bytes]:
        # Pods import the same code as this process: PYTHONPATH precedes the installed packages.
        paths = filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH")))
        with (self.folder / log).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

        def is_ready() -> bool:
            assert process.poll() is None, (self.folder / log).read_text()
            return ready.exists()

        wait_until(is_ready, f"{command[0]} is ready")
        return process


@contextlib.contextmanager
def start(folder: Path, *, time_scale: float = 0.05, **options: Any) -> Iterator[Simulated]:
    """Run a simulated cluster, and end it with the context.

    `options`: nodes (3), labels (["zone=a", "node-0:disk=fast"]), capacity ("example.com/npu=8"),
    without ("jobsets,..."), node_grace (seconds).
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


def _await_end(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        process.wait(bound_s(_END_S))
    except subprocess.TimeoutExpired as error:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise AssertionError(f"it did not end:\n{log.read_text()}") from error
