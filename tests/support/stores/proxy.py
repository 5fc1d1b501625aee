"""A proxy between a store and its S3 server that injects faults."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from waiting import bound_s, join


class Request(msgspec.Struct, frozen=True):
    """A request for which a test chooses a fault. `number` counts requests from 0."""

    number: int
    method: str
    path: str

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.path


class Answer(msgspec.Struct, frozen=True):
    """Answer the request instead of the server."""

    status: int
    code: str = ""
    message: str = ""


class Reset(msgspec.Struct, frozen=True):
    """Reset the connection. With `passed_on`, the server processes the request before."""

    passed_on: bool = False


class Stall(msgspec.Struct, frozen=True):
    """Send half of the answer's body, then nothing."""


class Late(msgspec.Struct, frozen=True):
    """Delay the answer by a number of seconds."""

    seconds: float


class Flip(msgspec.Struct, frozen=True):
    """Flip a bit of the request's body, or of the answer's body if the request has none."""


Fault = Answer | Reset | Stall | Late | Flip
Rule = Callable[[Request], Fault | None]


class Proxy:
    """The proxy, with its fault rule and its records.

    `rule`: returns the fault of a request, or None.
    `seen`: all requests, also those with a fault.
    `failures`: the exceptions of `rule`. Without this list, the thread of a request would hide them
    from the test.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.rule: Rule = lambda request: None
        self.seen: list[Request] = []
        self.failures: list[BaseException] = []
        self.port = 0
        self.released = threading.Event()
        self._lock = threading.Lock()

    def judge(self, method: str, path: str) -> Fault | None:
        with self._lock:
            request = Request(len(self.seen), method, path)
            self.seen.append(request)
        try:
            return self.rule(request)
        except BaseException as failure:
            self.failures.append(failure)
            raise

    def parts(self) -> int:
        """Return the number of uploaded parts since the last call."""
        with self._lock:
            sent = sum(request.is_part for request in self.seen)
            self.seen.clear()
        return sent


@contextlib.contextmanager
def proxied(upstream: int) -> Iterator[Proxy]:
    """Run a proxy of the server at this port."""
    proxy = Proxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = bound_s()

        def do_GET(self) -> None:
            _pass_on(self, proxy)

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore errors, because the proxy breaks connections on purpose."""

    server = Quiet(("127.0.0.1", 0), Handler)
    proxy.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        server.shutdown()
        join(thread)
        server.server_close()
    if proxy.failures:
        raise proxy.failures[0]


def _pass_on(handler: BaseHTTPRequestHandler, proxy: Proxy) -> None:
    body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    fault = proxy.judge(handler.command, handler.path)
    if isinstance(fault, Late):
        time.sleep(fault.seconds)
    if isinstance(fault, Answer):
        _reply(handler, fault.status, [], _error(fault))
        return
    if isinstance(fault, Reset) and not fault.passed_on:
        _reset(handler)
        return
    flipped = isinstance(fault, Flip)
    status, headers, answer = _ask(handler, proxy.upstream, _flip(body) if flipped else body)
    if isinstance(fault, Reset):
        _reset(handler)
        return
    if flipped and not body:
        answer = _flip(answer)
    half = answer[: len(answer) // 2] if isinstance(fault, Stall) else None
    _reply(handler, status, headers, answer, half)
    if half is not None:
        proxy.released.wait(bound_s())
        handler.close_connection = True


def _ask(
    handler: BaseHTTPRequestHandler, port: int, body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=bound_s())
    with contextlib.closing(connection):
        connection.putrequest(
            handler.command, handler.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in handler.headers.items():
            if name.lower() not in ("expect", "connection"):
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()


def _reply(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: list[tuple[str, str]],
    body: bytes,
    sent: bytes | None = None,
) -> None:
    handler.send_response_only(status)
    for name, value in headers:
        if name.lower() not in ("connection", "transfer-encoding", "content-length"):
            handler.send_header(name, value)
    # The answer to a HEAD request has no body.
    length = len(body) or next((int(v) for n, v in headers if n.lower() == "content-length"), 0)
    if status != 204:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(body if sent is None else sent)
    handler.wfile.flush()


def _reset(handler: BaseHTTPRequestHandler) -> None:
    option = struct.pack("ii", 1, 0)  # linger for 0 s, so that close() resets the connection
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
    handler.close_connection = True
    handler.connection.close()


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


def _error(fault: Answer) -> bytes:
    if not fault.code:
        return b""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>"
    ).encode()
