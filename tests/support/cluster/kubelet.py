"""`python -m cluster.kubelet`: nodes whose pods run as processes of this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import random
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from cluster.node import logs, marks, tasks
from cluster.node.api import Api
from cluster.node.machine import Machine
from cluster.node.pod import Kit, Pod
from cluster.node.services import Services

Object = dict[str, Any]


class Kubelet:
    """Pass pods to the machines to which they are bound."""

    def __init__(self, kit: Kit, machines: list[Machine]) -> None:
        self.kit = kit
        self.machines = {machine.name: machine for machine in machines}
        self._pods: dict[tuple[str, str], Object] = {}

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
        application.router.add_post("/nodes/{node}/{what}", self._order)
        return application

    async def run(self) -> None:
        async for what, found in self.kit.api.follow("/api/v1/pods"):
            if what == "LIST":
                gone = set(self._pods) - {_key(pod) for pod in found}
                for key in gone:
                    await self._lose(self._pods[key])
                for pod in found:
                    await self._see(pod)
            elif what == "DELETED":
                await self._lose(found)
            else:
                await self._see(found)

    def pods(self) -> list[Object]:
        return list(self._pods.values())

    async def _see(self, pod: Object) -> None:
        old = self._pods.get(_key(pod))
        if old and old["metadata"]["uid"] != pod["metadata"]["uid"]:
            await self._lose(old)
        self._pods[_key(pod)] = pod
        if machine := self.machines.get(pod["spec"].get("nodeName", "")):
            await machine.see(pod)

    async def _lose(self, pod: Object) -> None:
        self._pods.pop(_key(pod), None)
        if machine := self.machines.get(pod["spec"].get("nodeName", "")):
            await machine.lose(pod["metadata"]["uid"])

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _order(self, request: web.Request) -> web.Response:
        machine = self.machines.get(request.match_info["node"])
        if machine is None:
            return web.Response(status=404, text="no such node")
        if request.match_info["what"] == "crash":
            await machine.crash()
        else:
            name = machine.name
            own = [pod for pod in self._pods.values() if pod["spec"].get("nodeName") == name]
            await machine.come_back(own)
        return web.Response(text="ok")

    async def _log(self, request: web.Request) -> web.StreamResponse:
        names = request.match_info
        pod = self._find(names["namespace"], names["pod"])
        container = pod.container(names["container"]) if pod else None
        if pod is None or container is None:
            if self._is_down(names["namespace"], names["pod"]) and request.transport is not None:
                request.transport.abort()
            return web.Response(status=404, text=f'pod "{names["pod"]}" not found')
        wanted = logs.Wanted.read(request.query)
        response = web.StreamResponse()
        response.content_type = "text/plain"
        response.enable_chunked_encoding()
        await response.prepare(request)
        over = asyncio.Event()
        over.set()
        ended = over if wanted.previous else container.ended
        with contextlib.suppress(ConnectionError, RuntimeError):
            async for line in logs.read(container.log(wanted.previous), wanted, ended):
                await response.write(line)
        if pod.uid not in {uid for each in self.machines.values() for uid in each.pods}:
            if request.transport is not None:
                request.transport.abort()  # the node is down
        return response

    def _find(self, namespace: str, name: str) -> Pod | None:
        for machine in self.machines.values():
            for pod in machine.pods.values():
                if pod.key == (namespace, name):
                    return pod
        return None

    def _is_down(self, namespace: str, name: str) -> bool:
        pod = self._pods.get((namespace, name))
        machine = self.machines.get(pod["spec"].get("nodeName", "")) if pod else None
        return machine is not None and machine.is_down


def _key(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


def _labels(texts: list[str], node: str) -> dict[str, str]:
    """Return the labels of a node: from `a=b,c=d` for all nodes, and `node-0:a=b` for one node."""
    found: dict[str, str] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        if not colon or "=" in name:
            found |= _pairs(text)
        elif name == node:
            found |= _pairs(rest)
    return found


def _addresses() -> Any:
    number = random.randrange(250 * 250)

    def new() -> str:
        nonlocal number
        number = (number + 1) % (250 * 250)
        return f"127.2.{number // 250 + 1}.{number % 250 + 1}"

    return new


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cluster.kubelet")
    parser.add_argument("--server", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--labels", action="append", default=[])
    parser.add_argument("--capacity", default="", help="more resources: example.com/npu=8")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--late", type=float, default=15.0, help="seconds that its end may take")
    parser.add_argument("--beat", type=float, help="seconds between leases; 10 scaled")
    return parser.parse_args()


def _tell_if_late(late_s: float) -> None:
    """Write the stacks of tasks and threads to the log if the process does not end in time."""

    def tell() -> None:
        for task in asyncio.all_tasks():
            task.print_stack()

    asyncio.get_running_loop().call_later(late_s, tell)
    faulthandler.dump_traceback_later(late_s + 1)


async def _main() -> None:
    arguments = _arguments()
    root = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    reaper = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cluster.node.marks",
        mark,
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=3)
    capacity = {"cpu": "64", "memory": "256Gi", "pods": "110", **_pairs(arguments.capacity)}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        api = Api(session, arguments.server, arguments.token)
        kit = Kit(api, session, root, mark, arguments.time_scale, _addresses())
        beat = arguments.beat or 10 * arguments.time_scale
        machines = [
            Machine(kit, name, _labels(arguments.labels, name), capacity, beat)
            for name in (f"node-{number}" for number in range(arguments.nodes))
        ]
        kubelet = Kubelet(kit, machines)
        runner = web.AppRunner(
            kubelet.application(),
            access_log=None,
            shutdown_timeout=0.2,
            handler_cancellation=True,
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        for machine in machines:
            await machine.register(port)
        following = asyncio.create_task(kubelet.run())
        services = asyncio.create_task(Services(api, root, kubelet.pods).run())
        if arguments.port_file:
            part = arguments.port_file.with_suffix(".part")
            part.write_text(str(port))
            part.replace(arguments.port_file)
        await stop.wait()
        _tell_if_late(arguments.late)
        await tasks.end([following, services])
        await asyncio.gather(*(machine.close() for machine in machines))
        await runner.cleanup()
    marks.sweep_all(mark)
    assert reaper.stdin is not None
    reaper.stdin.close()
    await reaper.wait()


if __name__ == "__main__":
    asyncio.run(_main())
