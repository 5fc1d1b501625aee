"""Read answers in parts, over connections with the API client's settings for proxies and TLS.

Errors are OSError, as in http.client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import urllib3

from rekindle.engines.kubernetes.client.api_errors import ApiError, refusal, status_object_in
from rekindle.engines.kubernetes.client.credentials import Credentials

CONNECT_S = 30.0
_PIECE = 65536


class HttpStream:
    """One request and its answer, on a separate connection; another thread may break it off.

    root: the start of each URL. silence_s: seconds without a byte until the answer breaks off.
    """

    def __init__(self, credentials: Credentials, root: str, silence_s: float) -> None:
        # A used connection may be closed by now, and this class does not repeat a request.
        self._pool = credentials.connections()
        self._credentials = credentials
        self._root = root
        self._limits = urllib3.Timeout(connect=CONNECT_S, read=silence_s)
        self._response: urllib3.BaseHTTPResponse | None = None
        self._rest = bytearray()

    def request(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the request; repeat it once with new credentials if the server refuses it."""
        self._response = self._send(method, target, body, headers or {})
        if self.status == 401 and self._credentials.renew():
            self.close()
            self._response = self._send(method, target, body, headers or {})

    def _send(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> urllib3.BaseHTTPResponse:
        try:
            return self._pool.request(
                method,
                self._root + target,
                body=body,
                headers={**self._credentials.headers(), **headers},
                timeout=self._limits,
                retries=False,
                preload_content=False,
            )
        except urllib3.exceptions.TimeoutError as error:
            raise TimeoutError(str(error)) from error
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(str(error)) from error

    def getresponse(self) -> HttpStream:
        """Return the answer, which is this object."""
        return self

    @property
    def status(self) -> int:
        """Return the HTTP status of the answer."""
        return int(self._answer().status)

    def read(self) -> bytes:
        """Return the rest of the answer."""
        rest = bytearray(self._rest)
        self._rest.clear()
        while piece := self._piece():
            rest += piece
        return bytes(rest)

    def readline(self, most: int = 0) -> bytes:
        """Return the next line, or at most `most` bytes of it.

        The last line may be empty, and may lack its end.
        """
        begin = 0
        while (end := self._rest.find(b"\n", begin)) < 0 and not 0 < most <= len(self._rest):
            begin = len(self._rest)
            if not (piece := self._piece()):
                break
            self._rest += piece
        size = end + 1 if end >= 0 else len(self._rest)
        size = min(size, most) if most else size
        line = bytes(self._rest[:size])
        del self._rest[:size]
        return line

    def _piece(self) -> bytes:
        try:
            return self._answer().read1(_PIECE)
        except urllib3.exceptions.TimeoutError as error:
            raise TimeoutError(str(error)) from error
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(str(error)) from error

    def break_off(self) -> None:
        """End the answer for its reader, from another thread."""
        if self._response is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has already ended
                self._response.shutdown()

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._pool.clear()

    def _answer(self) -> urllib3.BaseHTTPResponse:
        assert self._response is not None
        return self._response


class Stream:
    """The lines of an answer. where: a short name of the request."""

    def __init__(self, http: HttpStream, where: str) -> None:
        self._http = http
        self._where = where

    def open(self, method: str, target: str) -> None:
        """Send the request. Raises ApiError."""
        try:
            self._http.request(method, target, headers={"Accept": "application/json"})
            if self._http.status >= 300:
                raise refusal(
                    f"{method} {self._where}",
                    self._http.status,
                    status_object_in(self._http.read()),
                )
        except OSError as error:
            raise ApiError(f"{method} {self._where} got no answer: {error}") from error

    def __iter__(self) -> Iterator[bytes]:
        """Yield each complete line. Raises ApiError: the answer broke off, or fell silent."""
        return (line for line in self.pieces() if line.endswith(b"\n"))

    def pieces(self, most: int = 0) -> Iterator[bytes]:
        """Yield each line in pieces of at most `most` bytes, and the incomplete last line.

        Raises ApiError: the answer broke off, or fell silent.
        """
        try:
            while piece := self._http.readline(most):
                yield piece
        except OSError as error:
            raise ApiError(
                f"{self._where}: the connection broke during the answer: {error}"
            ) from error

    def break_off(self) -> None:
        """End the answer for its reader, from another thread."""
        self._http.break_off()
