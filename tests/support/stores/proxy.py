"""A proxy between a store and its S3 server that breaks what a test says."""

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
    """What a test decides by; number: of this request, from 0."""

    number: int
    method: str
    path: str

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.path


class Answer(msgspec.Struct, frozen=True):
    """This instead of the server's answer."""

    status: int
    code: str = ""
    message: str = ""


class Reset(msgspec.Struct, frozen=True):
    """The connection is reset; passed_on: after the server has carried the request out."""

    passed_on: bool = False


class Stall(msgspec.Struct, frozen=True):
    """Half of the answer's body, then nothing."""


class Late(msgspec.Struct, frozen=True):
    """The answer comes so many seconds later."""

    seconds: float


class Flip(msgspec.Struct, frozen=True):
    """A bit of the request's body, or if it has none of the answer's, is another one."""


Fault = Answer | Reset | Stall | Late | Flip
Rule = Callable[[Request], Fault | None]


class Proxy:
    """rule: what is broken. seen: every request, also those that were broken.

    failures: what a rule raised. The thread of a request would otherwise hide it from the test.
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
        """How many parts of uploads were sent since this was asked last."""
        with self._lock:
            sent = sum(request.is_part for request in self.seen)
            self.seen.clear()
        return sent


@contextlib.contextmanager
def proxied(upstream: int) -> Iterator[Proxy]:
    """A proxy of the server at this port."""
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
            """Connections are broken on purpose."""

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
    # A HEAD request is answered without its body.
    length = len(body) or next((int(v) for n, v in headers if n.lower() == "content-length"), 0)
    if status != 204:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(body if sent is None else sent)
    handler.wfile.flush()


def _reset(handler: BaseHTTPRequestHandler) -> None:
    option = struct.pack("ii", 1, 0)  # linger for 0 s: closing it is a reset
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
