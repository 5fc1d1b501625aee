"""`python -m cluster.server`: the API server with its controllers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from cluster import access, discovery, kinds, proxying, refusals, subresources
from cluster.access import Users
from cluster.controllers import start_all
from cluster.controllers.loop import Settings
from cluster.faults import Call, Fault, Faults, moment
from cluster.operations import Operations
from cluster.refusals import Refused
from cluster.rest import APPLY_PATCH, Rest, answer, body, may_have_status
from cluster.store import Store
from cluster.targets import Target, find, verb

_OPEN = ("/readyz", "/livez", "/healthz", "/version")
_MAY_I = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_WHO_AM_I = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


class Server:
    """Answer requests from one store."""

    def __init__(self, store: Store, tokens: Path, settings: Settings, deny_for: float) -> None:
        self.store = store
        self.settings = settings
        self.operations = Operations(store)
        self.users = Users(store, tokens)
        self.rest = Rest(self.operations, settings.time_scale)
        self.faults = Faults()
        self.deny_until = moment() + deny_for
        self.session: aiohttp.ClientSession

    def application(self) -> web.Application:
        application = web.Application(client_max_size=64 * 2**20)
        application.cleanup_ctx.append(self._run)
        application.router.add_route("*", "/{path:.*}", self.handle)
        return application

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, connect=3)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=connector, auto_decompress=False
            ) as self.session,
            start_all(self.operations, self.settings),
        ):
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._handle(request)
        except Refused as refused:
            response = answer(refused.status(), refused.code)
            if "retryAfterSeconds" in refused.details:
                response.headers["Retry-After"] = str(refused.details["retryAfterSeconds"])
            return response

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in _OPEN[:3]:
            return web.Response(text="ok")
        if path == "/version":
            return answer(discovery.VERSION)
        user = self.users.of(request.headers.get("Authorization", ""))
        if path.startswith("/test/"):
            if not user.is_master:
                raise access.denial(user, None, access.Request(request.method.lower(), path=path))
            return await self._test(request)
        target = find(self.store.kinds, path)
        if target is None:
            return await self._no_object(request, user)
        what = verb(request.method, target, request.query)
        call = Call(moment(), user.name, what, target.resource, target.namespace, target.name)
        self.faults.note(call)
        try:
            await self._meet_fault(request, user, what, target)
            self._authorize(user, target, what)
            if self._applies_anew(request, target, what):
                self._authorize(user, target, "create")
            request["resource"] = target.resource
            response = await self._object(request, user, target, what)
        except Refused as refused:
            call.code = refused.code
            raise
        call.code = response.status
        return response

    def _authorize(self, user: access.User, target: Target, what: str) -> None:
        asked = target.request(what)
        early = moment() < self.deny_until and not user.is_master
        if early or access.allowed(self.store, user, asked) is None:
            raise access.denial(user, target.kind, asked)

    def _applies_anew(self, request: web.Request, target: Target, what: str) -> bool:
        """Return whether a server-side apply creates the object."""
        if what != "patch" or request.content_type != APPLY_PATCH:
            return False
        return self.store.look(target.kind, target.namespace, target.name) is None

    async def _meet_fault(
        self, request: web.Request, user: access.User, what: str, target: Target
    ) -> None:
        qualified = target.resource.replace(target.kind.plural, target.kind.resource, 1)
        fault = self.faults.next(what, (target.resource, qualified), user.name)
        if fault is None:
            return
        if fault.delay:
            await asyncio.sleep(fault.delay)
        if fault.code:
            raise refusals.injected(fault.code, fault.retry_after)
        if fault.cut:
            if what == "watch" or target.subresource == "log":
                request["cut_after"] = fault.after
            else:
                if request.transport is not None:
                    request.transport.abort()
                raise refusals.injected(500)

    async def _object(
        self, request: web.Request, user: access.User, target: Target, what: str
    ) -> web.StreamResponse:
        part = target.subresource
        if not part or may_have_status(target):
            return await self.rest.handle(request, target, what)
        method = request.method
        if part == "proxy" and target.kind in (kinds.SERVICES, kinds.PODS):
            return await proxying.proxy(self.store, self.session, request, target)
        if target.kind is kinds.PODS:
            if part == "log" and method == "GET":
                return await subresources.log(self.operations, self.session, request, target)
            if part == "binding" and method == "POST":
                return await subresources.binding(self.operations, request, target)
            if part == "eviction" and method == "POST":
                return await subresources.evict(self.operations, request, target)
        if target.kind is kinds.SERVICEACCOUNTS and part == "token" and method == "POST":
            return await subresources.token(self.operations, self.users, request, target)
        return web.Response(status=404, text="404 page not found\n")

    async def _no_object(self, request: web.Request, user: access.User) -> web.StreamResponse:
        if request.path in (_MAY_I, _WHO_AM_I) and request.method == "POST":
            if user is access.ANONYMOUS:
                group, resource = request.path.split("/")[2::2]
                raise access.denial(user, None, access.Request("create", group, resource))
            if request.path == _WHO_AM_I:
                return subresources.who(user)
            return await subresources.review(self.operations, user, request)
        asked = access.Request(request.method.lower(), path=request.path)
        if access.allowed(self.store, user, asked) is None:
            raise access.denial(user, None, asked)
        found = discovery.answer(self.store.kinds, request.path)
        if found is None or request.method != "GET":
            return web.Response(status=404, text="404 page not found\n")
        return answer(found)

    async def _test(self, request: web.Request) -> web.Response:
        """Answer the requests that tests send only to the simulated server."""
        what = request.path.removeprefix("/test/")
        wanted = await body(request)
        if what == "faults":
            if request.method == "DELETE":
                self.faults.waiting.clear()
            elif request.method == "POST":
                self.faults.waiting.append(msgspec.convert(wanted, Fault))
            return answer(self.faults.waiting)
        if what == "requests":
            if request.method == "DELETE":
                self.faults.calls.clear()
            since = float(request.query.get("since", 0))
            calls = [call for call in self.faults.calls if call.at >= since]
            return answer({"counts": self.faults.counted(since), "calls": calls})
        if what == "compact":
            self.store.compact()
            return answer({"oldest": self.store.oldest})
        if what == "cut":
            lines = [
                line
                for line in self.rest.lines
                if re.fullmatch(wanted.get("resource", ".*"), line.resource)
            ]
            for line in lines:
                line.cut()
            return answer({"cut": len(lines)})
        return web.Response(status=404, text="404 page not found\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cluster.server")
    parser.add_argument("--state", type=Path, required=True, help="the journal of all objects")
    parser.add_argument("--tokens", type=Path, required=True, help='token,user,uid,"groups"')
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--without", default="", help="kinds that it has not")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of every back-off and grace")
    parser.add_argument("--node-grace", type=float, help="seconds without a lease; 40 scaled")
    parser.add_argument("--deny-for", type=float, default=0.0, help="403 at first, so many seconds")
    parser.add_argument("--fault", action="append", default=[], help="met from the start, in JSON")
    return parser.parse_args()


async def _main() -> None:
    arguments = _arguments()
    store = Store(kinds.choose(arguments.without), arguments.state)
    settings = Settings(
        time_scale=arguments.time_scale,
        node_grace=arguments.node_grace or 40.0 * arguments.time_scale,
    )
    server = Server(store, arguments.tokens, settings, arguments.deny_for)
    server.faults.waiting += [msgspec.json.decode(text, type=Fault) for text in arguments.fault]
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        shutdown_timeout=0.2,
        handler_cancellation=True,  # a client that disconnects also ends the proxied request
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", arguments.port, reuse_address=True)
    await site.start()
    port = runner.addresses[0][1]
    if arguments.port_file:
        part = arguments.port_file.with_suffix(".part")
        part.write_text(str(port))
        part.replace(arguments.port_file)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    with contextlib.suppress(Exception):
        await runner.cleanup()
    store.close()


if __name__ == "__main__":
    asyncio.run(_main())
