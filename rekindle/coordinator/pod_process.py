"""The coordinator's process in a pod. It runs one attempt after another until its pod is removed.

    GET  /events?follow=0  the journal, also between attempts
    POST /attempt          begin one: {"attempt": N, "journal": "<the journal's lines>"}

Kubernetes restarts the process. If the attempt in its journal has not ended, it continues that
attempt, and the agents wait for it. If the journal was lost with the node, it waits for the process
that steers the job, which has a copy. A signal ends the process but not the job, because Kubernetes
sends a signal to move the pod.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from rekindle import names
from rekindle.console import Process, say, start
from rekindle.coordinator.http_api import application
from rekindle.coordinator.process import (
    BACKLOG,
    OTHER_FILES,
    Coordinator,
    allow_files,
    load_tables,
    tune_memory,
)
from rekindle.errors import JobError, RekindleError, UnexpectedError, UsageError
from rekindle.job.journal_reader import events_in
from rekindle.job.spec import JobDirectory, JobSpec, replace_file
from rekindle.recovery.journal import attempts, journal
from rekindle.recovery.journal.attempts import under_way
from rekindle.writer import flush, take_streams


class Attempt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order to begin an attempt.

    journal: the lines of the job's journal, for a coordinator that does not have a journal.
    """

    attempt: int
    journal: str = ""


def lay_out(path: Path, described: Path) -> JobDirectory:
    """Create the job's directory from its mounted description and secret.

    Raises UsageError: they do not exist, or cannot be read.
    """
    directory = JobDirectory(path)
    mounted = JobDirectory(described)
    spec, secret = mounted.spec(), mounted.secret()
    path.mkdir(parents=True, exist_ok=True)
    replace_file(path / names.SECRET_FILE, secret.encode())
    logs = str(path / names.LOGS_DIRECTORY)
    directory.create(msgspec.structs.replace(spec, directory=str(path), log_directory=logs))
    return directory


class PodCoordinator:
    """Serves the journal between attempts, and accepts the order to begin an attempt."""

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self._spec: JobSpec = directory.spec()
        self._ordered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self, listener: socket.socket) -> int:
        """Wait for an order, and return the number of its attempt."""
        # The size of a request is not limited, because a large job has a long journal.
        app = application(self._directory, client_max_size=0)
        app.add_routes(
            [
                web.get(names.PATH_EVENTS, self._events),
                web.post(names.PATH_ATTEMPT, self._begin),
                web.route("*", "/{path:.*}", self._not_now),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
            return await self._ordered
        finally:
            await runner.cleanup()

    async def _not_now(self, request: web.Request) -> web.Response:
        error = f"job {self._spec.job_id} is between attempts; ask again"
        return web.json_response({"error": error}, status=503)

    async def _events(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if request.query.get("follow") != "0" or not (since.isascii() and since.isdigit()):
            return await self._not_now(request)
        lines = journal.encode_all(events_in(self._directory.journal_file)[int(since) :])
        return web.Response(body=lines, content_type="application/x-ndjson")

    async def _begin(self, request: web.Request) -> web.Response:
        try:
            order = msgspec.json.decode(await request.read(), type=Attempt)
            received = journal.read(order.journal.encode().splitlines())
        except (msgspec.DecodeError, JobError) as error:
            return web.json_response({"error": f"the request is invalid: {error}"}, status=400)
        own = events_in(self._directory.journal_file)
        if self._ordered.done():
            return await self._not_now(request)
        events = own or received
        newest = attempts.number(events, none=-1)
        if order.attempt < newest or (order.attempt == newest and under_way(events) is None):
            over = f"attempt {order.attempt} is over; the next one is {newest + 1}"
            return web.json_response({"error": over}, status=409)
        try:
            load_tables(self._spec.fault_tables, self._spec.policy.dialect)
        except UsageError as error:
            return web.json_response({"error": str(error)}, status=422)
        if not own:
            replace_file(self._directory.journal_file, order.journal.encode())
        self._ordered.set_result(order.attempt)
        return web.json_response({})


def _listen(port: int) -> socket.socket:
    listener = socket.create_server(("", port), backlog=BACKLOG)
    listener.setblocking(False)
    return listener


def _leave(status: int) -> None:
    """End at once. Agents wait for the next coordinator.

    An agent has no order whose event is not in the journal's file, except on a full disk.
    """
    flush()
    os._exit(status)


async def serve(options: argparse.Namespace) -> None:
    """Run attempts until a signal ends the process."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _leave, 128 + number)
    directory = lay_out(options.directory, options.described)
    spec = directory.spec()
    allow_files(spec.nodes + spec.spares + OTHER_FILES)
    while True:
        attempt = under_way(events_in(directory.journal_file))
        if attempt is None:
            attempt = await PodCoordinator(directory).wait(_listen(options.port))
        await Coordinator(directory, attempt).run(_listen(options.port))


def main() -> None:
    """Run the coordinator of a job in its pod."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--directory", type=Path, required=True, help="the job directory, on a volume"
    )
    parser.add_argument(
        "--described", type=Path, required=True, help="the folder with the job's description"
    )
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    start(Process.COORDINATOR)
    take_streams()
    tune_memory()
    try:
        asyncio.run(serve(options))
    except UnexpectedError as error:  # `Inputs` has written a line about it
        sys.exit(error.exit_status)
    except RekindleError as error:
        say(str(error), logging.ERROR)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
