"""Starts the server and the kubelet, and breaks them."""

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
# Faults are not for the kubelet, unless a test says so.
_END_S = 30.0  # for the end of all processes of pods
EVERYBODY_ELSE = f"(?!{KUBELET}$).*"


class Simulated(Cluster):
    """The one of this package, with all that a test may do to it."""

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
        """Start the server if it was stopped."""
        if self._server.poll() is not None:
            self.start_server()

    def stop_server(self) -> None:
        """Killed, as by a fault."""
        self._server.kill()
        self._server.wait()

    def start_server(self, deny_for: float = 0.0, **fault: Any) -> None:
        """On its port, with the objects that it had.

        deny_for: seconds of 403 at first. fault: as inject() has them, met from the first request.
        """
        more = ["--fault", json.dumps({"user": EVERYBODY_ELSE, **fault})] if fault else []
        self._server = self._start_server(self.port, "--deny-for", str(deny_for), *more)

    def restart_server(self, deny_for: float = 0.0) -> None:
        self.stop_server()
        self.start_server(deny_for)

    def complaints(self) -> str:
        """What went wrong within the server or the kubelet; it should be nothing."""
        logs = (self.folder / name for name in ("server.log", "kubelet.log"))
        return "".join(log.read_text() for log in logs if "Traceback" in log.read_text())

    def kill_kubelet(self) -> None:
        """With all that its pods have started; all nodes fall silent."""
        self._kubelet.kill()
        self._kubelet.wait()

    def has_node(self, name: str) -> bool:
        """Whether the kubelet runs a node of this name."""
        number = name.removeprefix("node-")
        return number.isdigit() and int(number) < self._node_count

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
        return [each for each in found if each["user"] != KUBELET and user in ("", each["user"])]

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
        # What pods import is what we do: a checkout may stand before the installed one.
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
    """A cluster of this package.

    options: nodes (3), labels (["zone=a", "node-0:disk=fast"]), capacity ("example.com/npu=8"),
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
