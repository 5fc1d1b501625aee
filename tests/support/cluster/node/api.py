"""A client of the API server for the kubelet. It repeats calls that fail temporarily."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

_AGAIN_S = 0.1
_WATCH_S = 60


class Api:
    """Calls to the API server with one token."""

    def __init__(self, session: aiohttp.ClientSession, server: str, token: str) -> None:
        self._session = session
        self._server = server
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": "kubelet/1"}

    async def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Return status and answer of a call.

        Repeats the call after a lost connection and after a status that can be temporary, such as
        403 or 503.
        """
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, "Content-Type": content_type}
        while True:
            try:
                async with self._session.request(
                    method, self._server + path, data=data, headers=headers
                ) as found:
                    answer = await found.read()
                    if found.status not in (401, 403, 429, 500, 502, 503, 504):
                        return found.status, _decoded(answer)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(_AGAIN_S)

    async def patch(self, path: str, body: Any) -> tuple[int, Any]:
        return await self.call("PATCH", path, body, "application/strategic-merge-patch+json")

    async def follow(self, path: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield each event of a watch.

        Yield ("LIST", items) at the start and after each gap.
        """
        while True:
            _, found = await self.call("GET", path)
            yield "LIST", found["items"]
            version = found["metadata"]["resourceVersion"]
            while version:
                version = ""
                try:
                    query = f"watch=1&timeoutSeconds={_WATCH_S}&allowWatchBookmarks=true"
                    url = f"{self._server}{path}?{query}&resourceVersion="
                    async for kind, thing in self._events(
                        url + found["metadata"]["resourceVersion"]
                    ):
                        if kind == "ERROR":
                            break
                        version = found["metadata"]["resourceVersion"] = thing["metadata"][
                            "resourceVersion"
                        ]
                        if kind != "BOOKMARK":
                            yield kind, thing
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError, msgspec.DecodeError):
                    break
            await asyncio.sleep(_AGAIN_S)

    async def _events(self, url: str) -> AsyncIterator[tuple[str, Any]]:
        rest = b""
        async with self._session.get(url, headers=self._headers) as found:
            if found.status != 200:
                return
            async for data in found.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = msgspec.json.decode(line)
                    yield event["type"], event["object"]


def _decoded(answer: bytes) -> Any:
    try:
        return msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer.decode(errors="replace")
