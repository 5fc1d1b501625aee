"""Communicate with a job's coordinator over HTTP: read its state, and steer it under a lease.

The client is synchronous and uses `http.client`, so that any process can use it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from rekindle import names
from rekindle.errors import (
    JobError,
    LeaseHeldError,
    OtherVersionError,
    SilentError,
    UnansweredError,
    UsageError,
)
from rekindle.job.spec import Endpoint, JobSpec, bearer
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol.agent import Approval, Inject
from rekindle.protocol.http_views import Drain, JobView, Renewal
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.journal import journal

ANSWER_S = 10.0  # limit for each wait for a coordinator: to connect, or to read
# The coordinator sends something every second on a stream of events. A coordinator that sends
# nothing for this long does not answer.
SILENCE_S = 10.0
RENEW_S = 2.0  # pause between two renewals of the lease
_SHOWN = 200  # characters shown of an answer that is not a coordinator's, such as a page of HTML
# Statuses of a proxy that reaches no coordinator.
_ON_THE_WAY = (
    http.HTTPStatus.BAD_GATEWAY,
    http.HTTPStatus.SERVICE_UNAVAILABLE,
    http.HTTPStatus.GATEWAY_TIMEOUT,
)

T = TypeVar("T")


class HttpAnswer(Protocol):
    """An answer, read at once or in parts. A broken connection raises OSError or HTTPException."""

    @property
    def status(self) -> int:
        """Return the HTTP status."""

    def read(self) -> bytes:
        """Return the rest of the answer."""

    def readline(self) -> bytes:
        """Return the next line. The last line has no line end, and may be empty."""


class Connection(Protocol):
    """A connection for one request, with the methods of http.client."""

    def request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], /
    ) -> None:
        """Send the request."""

    def getresponse(self) -> HttpAnswer:
        """Wait for the start of the answer."""

    def close(self) -> None:
        """Close the connection and the answer."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The route to a coordinator: directly, or through a proxy.

    connect: takes the limit in seconds for each wait, and returns a connection that is not open
    yet. where: a short name of the coordinator.
    """

    connect: Callable[[float], Connection]
    where: str


def straight(endpoint: Endpoint) -> Transport:
    """Return the route to a coordinator whose address this process can reach."""
    host, port, pid = endpoint.host, endpoint.port, endpoint.pid
    return Transport(
        connect=lambda limit_s: http.client.HTTPConnection(host, port, timeout=limit_s),
        where=f"the job's coordinator ({f'process {pid}' if pid else f'{host}:{port}'})",
    )


class JobClient:
    """Sends requests to one coordinator.

    Each request raises JobError: the coordinator does not answer, or refuses.
    """

    def __init__(self, endpoint: Endpoint, secret: str, transport: Transport | None = None) -> None:
        self._transport = transport or straight(endpoint)
        self._headers = {names.HEADER_SECRET: bearer(secret)}

    def status(self, *, limit_s: float = ANSWER_S) -> JobView:
        """Fetch the state of the job. limit_s: seconds for each wait for the coordinator."""
        with self._call("GET", names.PATH_JOB, limit_s=limit_s) as call:
            return call.decode(JobView)

    def spec(self) -> tuple[JobSpec, int]:
        """Fetch the job's description, and the number of its attempt."""
        with self._call("GET", names.PATH_SPEC) as call:
            return call.decode(tuple[JobSpec, int])

    def history(self, *, since: int = 0) -> list[journal.AnyEvent]:
        """Fetch the present events with a sequence number above `since`."""
        target = f"{names.PATH_EVENTS}?{urlencode({'since': since, 'follow': 0})}"
        with self._call("GET", target) as call:
            return journal.read(call.read().splitlines())

    def begin(self, attempt: int, history: Sequence[journal.AnyEvent]) -> None:
        """Order a coordinator in a pod to begin an attempt of a job with this history.

        Raises UsageError: the coordinator cannot use the job's tables of faults.
        """
        order = {"attempt": attempt, "journal": journal.encode_all(history).decode()}
        self._post(names.PATH_ATTEMPT, json.dumps(order).encode())

    def events(self, *, since: int = 0) -> EventStream:
        """Follow the job's events with a number above `since`, without steering the job."""
        return self._stream(names.PATH_EVENTS, {"since": since})

    def steer(self, *, holder: str, token: str, since: int = 0) -> EventStream:
        """Take the lease and follow the events; the open stream holds the lease.

        The iteration over the stream renews the lease. holder: the name of this process for
        others. token: identifies the holder; a holder whose stream broke gets the lease again.

        Raises LeaseHeldError, also during the iteration: another process steers the job; the
        message names it.
        """
        query = {"holder": holder, "token": token, "since": since}
        renewal = msgspec.json.encode(Renewal(token=token))
        renew = functools.partial(self._post, names.PATH_LEASE, renewal)
        return self._stream(names.PATH_STEER, query, renew)

    def approve(self, answer: Approval) -> None:
        """Answer an incident that waits for a person. Raises JobError: it does not wait."""
        self._post(names.PATH_APPROVE, msgspec.json.encode(answer))

    def report(self, health_event: HealthEvent) -> None:
        """Report a health event of a node to the job.

        Raises JobError: the coordinator refuses it.
        """
        self._post(names.PATH_HEALTH_EVENTS, msgspec.json.encode(health_event))

    def stop(self, *, by: str) -> None:
        """Stop the job for a person, regardless of the process that steers it."""
        self._post(names.PATH_STOP, json.dumps({"by": by}).encode())

    def drain(self, order: Drain) -> None:
        """Move a node to another agent. Raises JobError: the node cannot move."""
        self._post(names.PATH_DRAIN, msgspec.json.encode(order))

    def profile(self, order: ProfilingOrder) -> None:
        """Switch light profiling.

        Raises JobError: the job ends, or these kinds cannot be off alone.
        """
        self._post(names.PATH_PROFILE, msgspec.json.encode(order))

    def inject(self, fault: Inject) -> None:
        """Inject a fault into a rank.

        Raises JobError: the job does not allow it, or it is impossible.
        """
        self._post(names.PATH_INJECT, msgspec.json.encode(fault))

    def _post(self, path: str, body: bytes) -> None:
        with self._call("POST", path, body) as call:
            call.read()

    def _stream(
        self, path: str, query: dict[str, Any], renew: Callable[[], None] = lambda: None
    ) -> EventStream:
        call = self._call("GET", f"{path}?{urlencode(query)}", limit_s=SILENCE_S)
        return EventStream(call, renew)

    def _call(
        self, method: str, target: str, body: bytes | None = None, *, limit_s: float = ANSWER_S
    ) -> _Call:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        return _Call(self._transport.where, self._transport.connect(limit_s)).send(
            method, target, body, headers
        )


class EventStream(AbstractContextManager["EventStream"]):
    """Yields the events of a job as they arrive, until the job has ended.

    renew: the iteration calls this every RENEW_S, while the coordinator sends.
    """

    def __init__(self, call: _Call, renew: Callable[[], None]) -> None:
        self._call = call
        self._renew = renew
        self._renewed = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[journal.AnyEvent]:
        """Yield each event. Raises JobError: the stream broke off before the job ended."""
        ended = False
        while line := self._read_line(may_end=ended):
            if json.loads(line).get("type") == "keepalive":
                self._renew_if_due()
                continue
            event = journal.decode(line)
            # The Ended event of an earlier attempt may precede others. Only that of the newest
            # attempt is last.
            ended = isinstance(event, journal.Ended)
            if not ended:  # after the end the coordinator may have exited
                self._renew_if_due()
            yield event

    def _renew_if_due(self) -> None:
        if time.monotonic() - self._renewed > RENEW_S:
            # If the coordinator has ended, its last events may still wait to be read.
            with contextlib.suppress(UnansweredError):
                self._renew()
            self._renewed = time.monotonic()

    def _read_line(self, *, may_end: bool = False) -> bytes:
        try:
            line = self._call.response.readline()
        except TimeoutError as error:
            raise SilentError(f"{self._call.where} sent nothing for {SILENCE_S:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise JobError(f"{self._call.where} has ended: {error!r}") from error
        if not line.endswith(b"\n") and not may_end:
            raise JobError(
                f"{self._call.where} has ended: its stream of events stopped before the end of "
                "the job"
            )
        return line

    def close(self) -> None:
        """Close the connection, and release the lease if this stream holds it."""
        self._call.close()


class _Call(AbstractContextManager["_Call"]):
    """One request and its answer; it turns refusals into errors."""

    def __init__(self, where: str, connection: Connection) -> None:
        self.where = where
        self._connection = connection

    def send(self, method: str, target: str, body: bytes | None, headers: dict[str, str]) -> _Call:
        """Send the request and wait for the start of the answer; return this object."""
        try:
            self._connection.request(method, target, body, headers)
            self.response = self._connection.getresponse()
        except TimeoutError as error:
            self.close()
            raise SilentError(f"{self.where} does not answer in time") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise UnansweredError(f"{self.where} does not answer: {error}") from error
        if self.response.status != http.HTTPStatus.OK:
            self._refuse()
        return self

    def read(self) -> bytes:
        """Read the complete answer. Raises UnansweredError: it broke off."""
        try:
            return self.response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnansweredError(
                f"{self.where} has ended: its answer is incomplete ({error!r})"
            ) from error

    def decode(self, kind: type[T]) -> T:
        """Decode the complete answer from JSON. Raises JobError: it has another format."""
        try:
            return msgspec.json.decode(self.read(), type=kind)
        except msgspec.DecodeError as error:
            what = f"{self.where} answers as another version of Rekindle does ({error}); it"
            raise OtherVersionError.of(what, "of that version", names.WIRE_VERSION) from error

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _refuse(self) -> None:
        status = self.response.status
        try:
            body = self.read().decode(errors="replace")
        finally:
            self.close()
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        answer = answer if isinstance(answer, dict) else {}
        text = answer.get("error") or answer.get("message") or " ".join(body.split())[:_SHOWN]
        if status == http.HTTPStatus.CONFLICT:
            raise LeaseHeldError(f"{self.where} refuses: {text}")
        # An API server that passes requests on puts its own apiVersion into its answers.
        on_the_way = status in _ON_THE_WAY or "apiVersion" in answer
        if status == http.HTTPStatus.UNPROCESSABLE_ENTITY and not on_the_way:
            raise UsageError(f"{self.where} refuses: {text}")
        refusal = UnansweredError if on_the_way else JobError
        raise refusal(f"{self.where} refuses with HTTP status {status}: {text}")
