"""Services: each has an address of this machine, which leads to its ready pods, and a name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.node.api import Api

Object = dict[str, Any]


_ADDRESSES = 250 * 250


class Services:
    """Forward connections to pods. `pods` returns the current pods."""

    def __init__(self, api: Api, root: Path, pods: Callable[[], list[Object]]) -> None:
        self._api = api
        self.file = root / "services.json"
        self._pods = pods
        self._addresses: dict[str, str] = {}
        self._servers: dict[str, list[asyncio.Server]] = {}
        first = random.randrange(_ADDRESSES)
        self._free = (_address((first + n) % _ADDRESSES) for n in itertools.count())
        self._write()

    async def run(self) -> None:
        """Follow the services of the cluster."""
        async for what, found in self._api.follow("/api/v1/services"):
            if what == "LIST":
                there = {_key(each): each for each in found}
                for key in set(self._addresses) - set(there):
                    self._lose(key)
                for each in found:
                    await self._see(each)
            elif what == "DELETED":
                self._lose(_key(found))
            else:
                await self._see(found)

    async def _see(self, service: Object) -> None:
        key = _key(service)
        if key in self._addresses or service["spec"].get("clusterIP") == "None":
            return
        while True:
            address = next(self._free)
            with contextlib.suppress(OSError):  # another kubelet uses the address
                self._servers[key] = [
                    await asyncio.start_server(self._server(service, port), address, port["port"])
                    for port in service["spec"].get("ports") or []
                ]
                break
        self._addresses[key] = address
        self._write()

    def _lose(self, key: str) -> None:
        self._addresses.pop(key, None)
        for server in self._servers.pop(key, []):
            server.close()
        self._write()

    def _write(self) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self._addresses))
        part.replace(self.file)

    def _server(self, service: Object, port: Object) -> Callable[..., Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                found = self._backend(service, port)
                if found is None:
                    return
                theirs, to_them = await asyncio.open_connection(*found)
                with contextlib.closing(to_them):
                    both = [
                        asyncio.ensure_future(_copy(reader, to_them)),
                        asyncio.ensure_future(_copy(theirs, writer)),
                    ]
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    for each in both:
                        each.cancel()

        return serve

    def _backend(self, service: Object, port: Object) -> tuple[str, int] | None:
        wanted = service["spec"].get("selector") or {}
        for pod in self._pods():
            metadata = pod["metadata"]
            mine = metadata["namespace"] == service["metadata"]["namespace"]
            labels = (metadata.get("labels") or {}).items()
            if mine and wanted.items() <= labels and _is_ready(pod):
                return pod["status"]["podIP"], _target(pod, port.get("targetPort", port["port"]))
        return None


def _address(number: int) -> str:
    return f"127.3.{number // 250 + 1}.{number % 250 + 1}"


def _is_ready(pod: Object) -> bool:
    status = pod.get("status") or {}
    ready = any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in status.get("conditions") or []
    )
    return ready and not pod["metadata"].get("deletionTimestamp")


def _target(pod: Object, port: int | str) -> int:
    named = {
        each.get("name"): each["containerPort"]
        for container in pod["spec"]["containers"]
        for each in container.get("ports") or []
    }
    return int(named.get(port, port))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()


def _key(service: Object) -> str:
    return f"{service['metadata']['name']}.{service['metadata']['namespace']}"
