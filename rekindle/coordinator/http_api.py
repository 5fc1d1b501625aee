"""The coordinator's HTTP API, for users and flows.

GET  /spec           the job's description, for nodes that join
GET  /job            the present state of the job, as JSON
GET  /events         the journal since event `since`, then live, as JSON lines; follow=0: not live
GET  /steer          like /events, with the lease to steer the job
POST /lease          the holder of the lease renews it
POST /approve        a user's answer to a strategy that waits for it
POST /stop           a user ends the job, also if another process steers it
POST /drain          a user moves a node to another agent
POST /inject         a fault to inject into a rank
POST /profile        the kinds of times that ranks record
POST /health-events  a health event from a monitor, an engine or a user
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rekindle import names
from rekindle.coordinator.event_log import EventLog
from rekindle.coordinator.inputs import Inputs
from rekindle.coordinator.machine.machine import Machine
from rekindle.job.spec import JobDirectory, is_authorized
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol import agent as protocol
from rekindle.protocol import http_views as view
from rekindle.protocol.http_views import JobView, NodeView, RankView
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.journal import journal
from rekindle.supervised import within

KEEPALIVE_S = 1.0

# A holder that has not renewed the lease for so long loses it to another process. A request for the
# lease may take that long, so it is less than SILENCE_S of the client.
LEASE_S = 8.0
ASK_S = 5.0  # time that the holder has at least, after another process has asked for the lease

T = TypeVar("T")


def job_view(machine: Machine, holder: str) -> JobView:
    """Describe the present state of the job. holder: the process that steers it."""
    job = machine.job
    ranks = [
        RankView(rank=r.rank, node=r.node, pid=r.pid, finished=r.finished, status=r.status.value)
        for r in job.roster.ranks
    ]
    nodes = [
        NodeView(
            node=n.node,
            address=n.address,
            pid=n.pid,
            copies={rank: tuple(step for step, _ in kept) for rank, kept in n.copies.items()},
        )
        for n in (*job.roster.nodes.values(), *job.roster.spares.values())
    ]
    return JobView(
        job_id=job.spec.job_id,
        state=job.phase.value,
        attempt=job.attempt,
        generation=job.generation,
        world_size=job.roster.world_size,
        finished=min(rank.finished for rank in job.roster.world),
        total=machine.checkpoints.total,
        ranks=ranks,
        nodes=nodes,
        holder=holder,
        metrics=machine.checkpoints.metrics,
        moves=machine.moves.views(),
        wire=names.WIRE_VERSION,
    )


class Lease:
    """The lease: the right to steer the job, which one process has at a time.

    The holder has an open connection, and renews the lease with requests. The kernel closes the
    connections of a killed process, but not those of a stopped process or a dead machine. So
    another process that asks for the lease gets it if the holder does not renew it.

    holder: the name of the process that steers the job; "": none.
    """

    def __init__(self) -> None:
        self.holder = ""
        self._token = ""
        self._stream: asyncio.Task[object] | None = None  # serves the holder's connection
        self._renewed_at = 0.0
        self._renewed = asyncio.Event()

    @contextlib.contextmanager
    def held(self, holder: str, token: str) -> Iterator[None]:
        """Give the lease to a process until the block ends. An earlier holder loses its stream."""
        if self._stream is not None:
            self._stream.cancel()
        stream = self._stream = asyncio.current_task()
        self.holder, self._token = holder, token
        self.renew(token)
        try:
            yield
        finally:
            if self._stream is stream:  # no other process has taken the lease
                self.holder, self._token, self._stream = "", "", None
                self._renewed.set()

    def renew(self, token: str) -> bool:
        """Note a sign of life of the holder. Return False: another process has the lease."""
        if self._token not in ("", token):
            return False
        self._renewed_at = asyncio.get_running_loop().time()
        self._renewed.set()
        return True

    async def is_free_for(self, token: str) -> bool:
        """Return whether this process may take the lease: no other live process holds it.

        The holder, or this process itself, may have been stopped for a while. So the holder has
        ASK_S to renew the lease, however old its last renewal is.
        """
        if self._token in ("", token):
            return True
        age_s = asyncio.get_running_loop().time() - self._renewed_at
        self._renewed.clear()
        try:
            await within(self._renewed.wait(), max(LEASE_S - age_s, ASK_S))
        except asyncio.TimeoutError:
            return True
        return self._token in ("", token)


class HttpApi:
    """Answers requests about one attempt.

    inputs: gives orders to the machine.
    """

    def __init__(self, machine: Machine, event_log: EventLog, inputs: Inputs) -> None:
        self._machine = machine
        self._event_log = event_log
        self._inputs = inputs
        self._lease = Lease()

    def serve(self, router: web.UrlDispatcher) -> None:
        """Add the routes of the API to the router."""
        machine = self._machine
        orders: dict[str, tuple[type[Any], Callable[[Any], str]]] = {
            names.PATH_INJECT: (protocol.Inject, machine.injections.inject),
            names.PATH_PROFILE: (
                ProfilingOrder,
                lambda order: machine.switch.switch(order, time.time()),
            ),
            names.PATH_APPROVE: (protocol.Approval, machine.recovery.approve),
            names.PATH_STOP: (view.Stop, self._stop),
            names.PATH_DRAIN: (view.Drain, lambda order: machine.moves.drain(order, time.time())),
            names.PATH_HEALTH_EVENTS: (
                HealthEvent,
                lambda health_event: machine.health.on_health_event(health_event, time.time()),
            ),
        }
        router.add_routes(
            [
                web.get(names.PATH_SPEC, self._description),
                web.get(names.PATH_JOB, self._job),
                web.get(names.PATH_EVENTS, self._stream),
                web.get(names.PATH_STEER, self._steer),
                web.post(names.PATH_LEASE, self._renew),
                *(
                    web.post(path, functools.partial(self._order, kind, do))
                    for path, (kind, do) in orders.items()
                ),
            ]
        )

    async def _job(self, request: web.Request) -> web.Response:
        """Return the present state of the job."""
        body = job_view(self._machine, self._lease.holder)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _description(self, request: web.Request) -> web.Response:
        """Return the job's description for a node that joins: [JobSpec, attempt]."""
        body = msgspec.json.encode((self._machine.job.spec, self._machine.job.attempt))
        return web.Response(body=body, content_type="application/json")

    async def _steer(self, request: web.Request) -> web.StreamResponse:
        """Stream the journal to the one process that steers the job."""
        holder, token = request.query.get("holder", ""), request.query.get("token", "")
        if not holder or not token:
            error = "a parameter is missing; give ?holder=NAME&token=TOKEN"
            return web.json_response({"error": error}, status=400)
        if not await self._lease.is_free_for(token):
            return self._held()
        with self._lease.held(holder, token):
            return await self._stream(request)

    async def _renew(self, request: web.Request) -> web.Response:
        """Renew the lease of its holder."""
        try:
            renewal = msgspec.json.decode(await request.read(), type=view.Renewal)
        except msgspec.DecodeError as error:
            return web.json_response({"error": f"the request is invalid: {error}"}, status=400)
        if not self._lease.renew(renewal.token):
            return self._held()
        return web.json_response({})

    def _held(self) -> web.Response:
        holder = self._lease.holder
        body = {"error": f"{holder} steers this job", "holder": holder}
        return web.json_response(body, status=409)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Stream the journal."""
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdigit()):
            return web.json_response(
                {"error": f"since={since} is not a number; give a number from 0"}, status=400
            )
        if request.query.get("follow") == "0":
            log = self._event_log
            lines = journal.encode_all(log.events[int(since) : log.recorded])
            return web.Response(body=lines, content_type="application/x-ndjson")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            async for line in self._event_log.follow(int(since), KEEPALIVE_S):
                await response.write(line + b"\n")
        return response

    def _stop(self, order: view.Stop) -> str:
        """Stop the job for a user, also if another process steers it."""
        self._machine.endings.stop(f"stopped by {order.by}")
        return ""

    async def _order(
        self, kind: type[T], do: Callable[[T], str], request: web.Request
    ) -> web.Response:
        """Carry out an order of this kind. `do` returns why it refuses, or an empty text."""
        try:
            order = msgspec.json.decode(await request.read(), type=kind)
        except msgspec.DecodeError as error:
            return web.json_response({"error": f"the request is invalid: {error}"}, status=400)
        refused = self._inputs.give("order", order, lambda: do(order))
        if refused is None:
            body = {"error": "the coordinator ends because of a bug; ask the next one"}
            return web.json_response(body, status=503)
        await self._event_log.settle()  # a takeover knows an order that was answered
        if refused:
            return web.json_response({"error": refused}, status=400)
        return web.json_response({})


def application(directory: JobDirectory, *, client_max_size: int = 1 << 20) -> web.Application:
    """Return a web application that refuses a request without the job's secret.

    A process on this machine may report health events with the token of monitors instead.

    client_max_size: the longest body of a request, in bytes; 0: any length.
    """
    secret, job_id = directory.secret(), directory.spec().job_id
    token = directory.monitor_token()

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(names.HEADER_SECRET) or request.headers.get("Authorization")
        reports = request.path == names.PATH_HEALTH_EVENTS and _is_local(request.remote)
        is_monitor = bool(token) and reports and is_authorized(given, token)
        if is_monitor or is_authorized(given, secret):
            return await handler(request)
        known = f"give the secret of this job in {names.ENV_SECRET}"
        if secret == names.NO_SECRET:
            known = f"its first machine has no {names.ENV_SECRET}; set the same on all, or none"
        error = f"wrong or missing secret for job {job_id}; {known}"
        return web.json_response({"error": error}, status=401)

    return web.Application(middlewares=[authorize], client_max_size=client_max_size)


def _is_local(remote: str | None) -> bool:
    """Return whether a request comes from this machine over its loopback address."""
    return remote is not None and ipaddress.ip_address(remote).is_loopback
