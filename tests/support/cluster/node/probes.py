"""Readiness probes of containers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

Object = dict[str, Any]


async def watch(
    session: aiohttp.ClientSession,
    container: Object,
    address: str,
    tell: Callable[[bool], None],
    scale: float,
) -> None:
    """Probe until cancelled, and call `tell` at each change."""
    probe = container["readinessProbe"]
    await asyncio.sleep(probe.get("initialDelaySeconds", 0) * scale)
    ready, good, bad = False, 0, 0
    while True:
        if await _succeeds(session, container, probe, address):
            good, bad = good + 1, 0
        else:
            good, bad = 0, bad + 1
        now = ready
        if good >= probe.get("successThreshold", 1):
            now = True
        elif bad >= probe.get("failureThreshold", 3):
            now = False
        if now != ready:
            ready = now
            tell(ready)
        await asyncio.sleep(max(0.05, probe.get("periodSeconds", 10) * scale))


async def _succeeds(
    session: aiohttp.ClientSession, container: Object, probe: Object, address: str
) -> bool:
    timeout = float(probe.get("timeoutSeconds", 1))
    try:
        return await asyncio.wait_for(_ask(session, container, probe, address), timeout)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return False


async def _ask(
    session: aiohttp.ClientSession, container: Object, probe: Object, address: str
) -> bool:
    if action := probe.get("httpGet"):
        host, port = action.get("host") or address, _port(container, action["port"])
        url = f"http://{host}:{port}{action.get('path') or '/'}"
        async with session.get(url, allow_redirects=False) as found:
            return 200 <= found.status < 400
    if action := probe.get("tcpSocket"):
        host, port = action.get("host") or address, _port(container, action["port"])
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
    return True  # other kinds of probes are not simulated


def _port(container: Object, port: object) -> int:
    for each in container.get("ports") or []:
        if each.get("name") == port:
            return int(each["containerPort"])
    return int(str(port))
