"""Servers between a client and a server: an HTTP proxy, and a TLS endpoint."""

from __future__ import annotations

import contextlib
import selectors
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

_HEAD_END = b"\r\n\r\n"


class Between(socketserver.ThreadingTCPServer):
    """Forward bytes. `asked` has the first line of each connection to a proxy."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: tuple[str, int] | None, context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.context = context
        self.asked: list[str] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(socketserver.BaseRequestHandler):
    server: Between

    def handle(self) -> None:
        client: socket.socket = self.request
        with contextlib.suppress(OSError):
            if self.server.context is not None:
                client = self.server.context.wrap_socket(client, server_side=True)
            with contextlib.closing(client):
                first, target = b"", self.server.target
                if target is None:
                    first, target = self._asked(client)
                with socket.create_connection(target) as server:
                    server.sendall(first)
                    _join(client, server)

    def _asked(self, client: socket.socket) -> tuple[bytes, tuple[str, int]]:
        """Return the bytes to forward of a proxy's first request, and the target."""
        head = b""
        while _HEAD_END not in head:
            head += client.recv(65536)
        line = head.split(b"\r\n", 1)[0].decode()
        self.server.asked.append(line)
        method, where, _ = line.split()
        if method == "CONNECT":
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            host, _, port = where.rpartition(":")
            return b"", (host, int(port))
        parts = urlsplit(where)
        return head, (parts.hostname or "", parts.port or 80)


def _join(client: socket.socket, server: socket.socket) -> None:
    """Forward the bytes of both sides until one side ends."""
    other = {client: server, server: client}
    with selectors.DefaultSelector() as selector:
        for each in other:
            selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source = client if key.fileobj is client else server
                if not (data := source.recv(65536)):
                    return
                while isinstance(source, ssl.SSLSocket) and source.pending():
                    data += source.recv(65536)
                other[source].sendall(data)


@contextlib.contextmanager
def proxy() -> Iterator[Between]:
    """Run an HTTP proxy."""
    with _serving(Between(None, None)) as found:
        yield found


@contextlib.contextmanager
def tls(target: tuple[str, int], certificate: tuple[str, str]) -> Iterator[Between]:
    """Run a TLS endpoint in front of a server. `certificate`: the files of certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with _serving(Between(target, context)) as found:
        yield found


@contextlib.contextmanager
def _serving(server: Between) -> Iterator[Between]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
