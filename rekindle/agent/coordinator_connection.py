"""The connection from an agent to the coordinator of its job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from http import HTTPStatus

import aiohttp

from rekindle import names
from rekindle.agent.threads import in_thread
from rekindle.errors import JobError
from rekindle.job.journal_reader import is_over
from rekindle.job.spec import JobDirectory, bearer
from rekindle.protocol import agent as protocol

PING_S = 20.0  # a coordinator counts as lost if its machine is silent for 1.5 times as long
CONNECT_S = 60.0  # how long an agent waits for a coordinator that starts later

Websocket = aiohttp.ClientWebSocketResponse[bool]


def open_session(secret: str) -> aiohttp.ClientSession:
    """Open the HTTP session for `connect`. Call it in the event loop."""
    version = str(names.WIRE_VERSION)
    headers = {"Authorization": bearer(secret), names.HEADER_WIRE: version}
    return aiohttp.ClientSession(headers=headers)


async def connect(
    session: aiohttp.ClientSession, url: str, directory: JobDirectory, limit_s: float
) -> Websocket:
    """Wait until the coordinator accepts the connection, and return it.

    Raises JobError: the job has ended, the coordinator refuses, or the limit has passed.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return await session.ws_connect(url, heartbeat=PING_S, max_msg_size=16 << 20)
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 401:
                spec = await in_thread(directory.spec)
                raise JobError(
                    f"the coordinator at {url} refuses this job secret; "
                    f"give the one of job {spec.job_id} in {names.ENV_SECRET}"
                ) from error
            if error.status == HTTPStatus.UPGRADE_REQUIRED and error.headers is not None:
                raise JobError(
                    f"the coordinator at {url} has wire version "
                    f"{error.headers.get(names.HEADER_WIRE)}, this agent {names.WIRE_VERSION}; "
                    "install the same version of Rekindle on all machines of a job"
                ) from error
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise JobError(
                    f"the server at {url} is not a Rekindle coordinator: {error.message}"
                ) from error
            if time.monotonic() > deadline:
                raise JobError(f"the coordinator at {url} does not begin an attempt") from error
            await asyncio.sleep(0.2)
        except aiohttp.ClientError as error:
            if await in_thread(is_over, directory.journal_file):
                raise JobError("the job has ended") from error
            if time.monotonic() > deadline:
                raise JobError(f"no coordinator answers at {url}: {error}") from error
            await asyncio.sleep(0.2)


async def decline(url: str, directory: JobDirectory, secret: str, hello: protocol.Hello) -> int:
    """Send Hello with the reason why this agent cannot work; return its exit status.

    Raises JobError: as `connect` does.
    """
    async with open_session(secret) as session:
        connection = await connect(session, url, directory, CONNECT_S)
        with contextlib.suppress(ConnectionError):  # the job may end before the coordinator answers
            await connection.send_bytes(protocol.encode(hello))
            await connection.receive()  # EndAgent
    return 1
