"""The connection from an agent to the coordinator of its job."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus

import aiohttp

from rekindle import names
from rekindle.agent.threads import in_thread
from rekindle.errors import JobError
from rekindle.job.journal_reader import is_over
from rekindle.job.spec import JobDirectory, bearer
from rekindle.protocol import agent as protocol
from rekindle.silence import Reaction, Silence, gaps
from rekindle.supervised import within

CONNECT_S = 60.0  # how long an agent waits for a coordinator that starts later
ANSWER_S = 10.0  # limit for one try to connect, and for each file that the agent reads meanwhile
CHECK_S = 1.0
PING_AFTER = 20  # checks: the agent pings a coordinator after 20 s of silence
LOST_AFTER = 30  # and it closes the connection after 30 s
_PAUSE_S = 0.2  # between two tries to connect
_CLOSE_S = 1.0  # limit for the other end to answer the close of a connection

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

    limit_s: how long the agent tries. The time of a try counts up to ANSWER_S, so that a machine
    that was suspended does not use it up.

    Raises JobError: the job has ended, the coordinator refuses, or the limit has passed.
    """
    loop, spent_s = asyncio.get_running_loop(), 0.0
    while True:
        began = loop.time()
        try:
            return await within(
                session.ws_connect(url, autoping=False, max_msg_size=16 << 20), ANSWER_S
            )
        except aiohttp.WSServerHandshakeError as error:
            await _judge(error, url, directory)
            failed = JobError(f"the coordinator at {url} does not begin an attempt")
            failed.__cause__ = error
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            if await _is_over(directory):
                raise JobError("the job has ended") from error
            reason = str(error) or f"no answer within {ANSWER_S:g} s"
            failed = JobError(f"no coordinator answers at {url}: {reason}")
            failed.__cause__ = error
        if spent_s > limit_s:
            raise failed
        await asyncio.sleep(_PAUSE_S)
        spent_s += min(loop.time() - began, ANSWER_S + _PAUSE_S)


async def _judge(error: aiohttp.WSServerHandshakeError, url: str, directory: JobDirectory) -> None:
    """Raise JobError if the server refuses the agent for good. Otherwise the agent tries again."""
    if error.status == HTTPStatus.UNAUTHORIZED:
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


async def _is_over(directory: JobDirectory) -> bool:
    """Return whether the journal on this machine has the end of the job, if it can be read."""
    try:
        return await within(in_thread(is_over, directory.journal_file), ANSWER_S)
    except asyncio.TimeoutError:
        return False


class Outbox:
    """The messages for the coordinator that are not sent yet, in order."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[tuple[protocol.Message, bytes]] = asyncio.Queue()

    def put(self, message: protocol.Message) -> None:
        """Send a message after the earlier ones.

        This encodes the message, so that the sender gets the error of an invalid one, and not the
        connection.
        """
        self._messages.put_nowait((message, protocol.encode(message)))

    def keep_lasting(self) -> list[protocol.Message]:
        """Keep and return the messages for each coordinator; drop those for the present one."""
        kept: list[protocol.Message] = []
        while not self._messages.empty():
            message, _ = self._messages.get_nowait()
            if message.lasting:
                kept.append(message)
        for message in kept:
            self.put(message)
        return kept

    async def send_all(self, connection: Websocket) -> None:
        """Send each message, until the connection is cut."""
        with contextlib.suppress(ConnectionError):
            while True:
                _, encoded = await self._messages.get()
                await connection.send_bytes(encoded)


class CoordinatorSilence:
    """The silence of the coordinator at the other end of a connection."""

    def __init__(self, connection: Websocket) -> None:
        self._connection = connection
        self._silence = Silence(ask_after=PING_AFTER, lost_after=LOST_AFTER, every_s=CHECK_S)

    def note_message(self) -> None:
        """Note that a frame has arrived."""
        self._silence.note_message()

    async def last(self) -> None:
        """Return when the coordinator hangs, or its machine is gone. Ping it before."""
        async for gap_s in gaps(CHECK_S):
            verdict = self._silence.check(gap_s)
            if verdict is Reaction.LOST:
                return
            if verdict is Reaction.ASK:
                with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                    await within(self._connection.ping(), CHECK_S)


class Link:
    """The newest connection to a coordinator.

    answered_at: the loop's time of its last answer to a ping. job_ends: whether that answer said
    that the coordinator ends the job.
    """

    def __init__(self) -> None:
        self.connection: Websocket | None = None
        self.answered_at = 0.0
        self.job_ends = False

    @property
    def is_open(self) -> bool:
        """Return whether there is an open connection."""
        return self.connection is not None and not self.connection.closed

    def note_answer(self, data: bytes) -> None:
        """Note the answer to a ping."""
        self.answered_at = asyncio.get_running_loop().time()
        self.job_ends = data == names.ENDING

    async def ask(self) -> None:
        """Send a ping."""
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            if self.connection is not None:
                await within(self.connection.ping(), ANSWER_S)

    async def close(self) -> None:
        """Close the connection, although the coordinator may not answer."""
        if self.connection is not None:
            await abandon(self.connection)


async def abandon(connection: Websocket) -> None:
    """Close a connection whose other end may not answer."""
    with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
        await within(connection.close(), _CLOSE_S)


async def decline(url: str, directory: JobDirectory, secret: str, hello: protocol.Hello) -> int:
    """Send Hello with the reason why this agent cannot work; return its exit status.

    Raises JobError: as `connect` does.
    """
    async with open_session(secret) as session:
        connection = await connect(session, url, directory, CONNECT_S)
        # The job may end before the coordinator answers.
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            await connection.send_bytes(protocol.encode(hello))
            await within(connection.receive(), ANSWER_S)  # EndAgent
    return 1
