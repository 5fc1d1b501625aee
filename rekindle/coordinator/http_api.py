"""The coordinator's HTTP API, for users and flows.

GET  /spec           the job's description, for nodes that join
GET  /job            the present state of the job, as JSON
GET  /events         the journal since event `since`, then live, as JSON lines; follow=0: not live
GET  /steer          like /events, with the lease to steer the job while the connection is open
POST /approve        a user's answer to a strategy that waits for it
POST /stop           a user ends the job, also if another process steers it
POST /drain          a user moves a node to another agent
POST /inject         a fault to inject into a rank
POST /profile        the kinds of times that ranks record
POST /health-events  a health event from a monitor, an engine or a user
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rekindle import names
from rekindle.coordinator.machine.machine import Machine
from rekindle.job.journal_file import JournalFile
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol import agent as protocol
from rekindle.protocol import http_views as view
from rekindle.protocol.http_views import JobView, NodeView, RankView
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.journal import journal


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
    )


KEEPALIVE_S = 1.0

T = TypeVar("T")


class HttpApi:
    """Answers requests about one attempt.

    carry_out: carries out the machine's commands.
    """

    def __init__(
        self, machine: Machine, journal_file: JournalFile, carry_out: Callable[[], None]
    ) -> None:
        self._machine = machine
        self._journal_file = journal_file
        self._carry_out = carry_out
        self._holder = ""  # the process that steers the job while its connection is open

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
                *(
                    web.post(path, functools.partial(self._order, kind, do))
                    for path, (kind, do) in orders.items()
                ),
            ]
        )

    async def _job(self, request: web.Request) -> web.Response:
        """Return the present state of the job."""
        body = job_view(self._machine, self._holder)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _description(self, request: web.Request) -> web.Response:
        """Return the job's description for a node that joins: [JobSpec, attempt]."""
        body = msgspec.json.encode((self._machine.job.spec, self._machine.job.attempt))
        return web.Response(body=body, content_type="application/json")

    async def _steer(self, request: web.Request) -> web.StreamResponse:
        """Stream the journal to the one process that steers the job."""
        holder = request.query.get("holder", "")
        if not holder:
            return web.json_response(
                {"error": "the parameter holder is missing; give ?holder=NAME"}, status=400
            )
        if self._holder:
            body = {"error": f"{self._holder} steers this job", "holder": self._holder}
            return web.json_response(body, status=409)
        self._holder = holder
        try:
            return await self._stream(request)
        finally:
            self._holder = ""

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Stream the journal."""
        since = request.query.get("since", "0")
        if not (since.isascii() and since.isdigit()):
            return web.json_response(
                {"error": f"since={since} is not a number; give a number from 0"}, status=400
            )
        if request.query.get("follow") == "0":
            lines = journal.encode_all(self._journal_file.events[int(since) :])
            return web.Response(body=lines, content_type="application/x-ndjson")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            async for line in self._journal_file.follow(int(since), KEEPALIVE_S):
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
        refused = do(order)
        self._carry_out()
        if refused:
            return web.json_response({"error": refused}, status=400)
        return web.json_response({})
