"""Requests to Kubernetes' API server, in plain dictionaries, as patient as they may be.

The official client finds the server and proves who we are; its pool carries the requests.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3
import yaml
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.config.config_exception import ConfigException

from rekindle.engines.client import SILENCE_S, Way
from rekindle.engines.kubernetes.errors import ApiError, ForbiddenError, refusal
from rekindle.errors import UsageError

Object = dict[str, Any]

MANAGER = "rekindle"  # the owner of the fields that we apply
ANSWER_S = 30.0
PATIENCE_S = 60.0  # a server that restarts needs half of it
# After a restart it refuses everybody until it has read its rules again: some seconds.
FORBIDDEN_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_UNREADABLE = (
    *(ConfigException, yaml.YAMLError, OSError),
    *(ValueError, TypeError, AttributeError, KeyError),
)
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"
_LATER = (429, 500, 502, 503, 504)
_PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


class Api:
    """One API server, and who we are there.

    Each request raises ApiError, or its kind that fits. What may pass is tried again meanwhile: no
    answer, too many requests, a failure of the server, for `patience_s`; and a refusal, for a
    shorter time, by a server that has let us do something before.
    """

    def __init__(self, configuration: Configuration, *, patience_s: float = PATIENCE_S) -> None:
        self._configuration = configuration
        self._client = ApiClient(configuration)
        self._pool = self._client.rest_client.pool_manager
        self._patience_s = patience_s
        self._was_let_in = False

    @property
    def host(self) -> str:
        """Where the server is."""
        return str(self._configuration.host).rstrip("/")

    @property
    def is_inside(self) -> bool:
        """Whether we are a pod of that cluster, by whose service account we are let in."""
        return str(self._configuration.ssl_ca_cert or "").startswith(_SERVICE_ACCOUNT)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # ---- one object, or a list of them

    def get(self, path: str, **query: object) -> Object:
        """Read an object or a list."""
        return self._request("GET", path, query)

    def create(self, path: str, body: Object, **query: object) -> Object:
        """Create an object in a collection."""
        return self._request("POST", path, query, body)

    def patch(self, path: str, body: object, how: str = "merge", **query: object) -> Object:
        """Change an object. how: merge, strategic or json."""
        return self._request("PATCH", path, query, body, _PATCHES[how])

    def apply(self, path: str, body: Object, **query: object) -> Object:
        """Have the object be as described, in all that we say about it."""
        query = {"fieldManager": MANAGER, "force": "true", **query}
        return self._request("PATCH", path, query, body, _PATCHES["apply"])

    def delete(
        self,
        path: str,
        *,
        uid: str = "",
        propagation: str = "Background",
        grace_s: int | None = None,
        **query: object,
    ) -> Object:
        """Delete an object, and what it owns; with `uid` only if it is that one.

        Or the objects of a collection that selectors choose. grace_s: of pods, 0 where their host
        will not answer. It stands in the body: beside one, the query's propagationPolicy is not
        looked at.
        """
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        body["propagationPolicy"] = propagation
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        return self._request("DELETE", path, query, body)

    # ---- streams

    @contextmanager
    def stream(self, path: str, *, silence_s: float, **query: object) -> Iterator[Stream]:
        """Open an answer that comes line by line; silence_s: it breaks off after so long."""
        stream = Stream(self._connect(silence_s), f"{self.host}{path}")
        try:
            stream.open("GET", self._target(path, query), self._headers())
            yield stream
        finally:
            stream.close()

    def way_to(self, path: str) -> Way:
        """The way to what the server passes requests on to, as it does to services."""
        prefix = urlsplit(self.host).path + path
        return Way(
            connect=lambda: self._connect(SILENCE_S),
            where=f"the job's coordinator (through {self.host})",
            prefix=prefix,
            headers=self._headers(),
        )

    def _connect(self, limit_s: float) -> http.client.HTTPConnection:
        """Make a connection of its own; those of the pool cannot be broken off by others."""
        settings = self._configuration
        parts = urlsplit(self.host)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port or 80, timeout=limit_s)
        context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if not settings.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
        return http.client.HTTPSConnection(host, port or 443, timeout=limit_s, context=context)

    # ---- carrying out

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        proofs: dict[str, Any] = dict(self._configuration.auth_settings())
        for proof in proofs.values():
            if proof["in"] == "header" and proof["value"]:
                headers[proof["key"]] = proof["value"]
        return headers

    def _target(self, path: str, query: Mapping[str, object]) -> str:
        asked = urlencode({name: value for name, value in query.items() if value not in ("", None)})
        return urlsplit(self.host).path + path + (f"?{asked}" if asked else "")

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: object = None,
        kind: str = "application/json",
    ) -> Object:
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                answer = self._once(method, path, query, body, kind)
                self._was_let_in = True
                return answer
            except _AgainError as again:
                waited_s = time.monotonic() - began
                limit_s = self._patience_s
                if isinstance(again.error, ForbiddenError):
                    limit_s = min(limit_s, FORBIDDEN_S) if self._was_let_in else 0.0
                if waited_s >= limit_s:
                    raise again.error from again.__cause__
                asked_s = again.after_s or random.uniform(0.5, 1.0) * pause_s
                time.sleep(min(asked_s, limit_s - waited_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _once(
        self, method: str, path: str, query: Mapping[str, object], body: object, kind: str
    ) -> Object:
        headers = self._headers()
        content = None
        if body is not None:
            headers["Content-Type"], content = kind, json.dumps(body)
        asked = f"{method} {self.host}{path}"
        url = urlsplit(self.host)._replace(path="").geturl() + self._target(path, query)
        try:
            response = self._pool.request(
                method, url, body=content, headers=headers, timeout=ANSWER_S, retries=False
            )
        except urllib3.exceptions.SSLError as error:
            raise ApiError(f"{asked}: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            raise _AgainError(ApiError(f"{asked}: no answer: {error}")) from error
        if response.status < 300:
            return _decoded(asked, response.data)
        refused = refusal(asked, response.status, _status_in(response.data))
        if response.status in _LATER or isinstance(refused, ForbiddenError):
            raise _AgainError(refused, _seconds(response.headers.get("Retry-After")))
        raise refused


class _AgainError(Exception):
    """A request that may be tried again: what it failed of, and in how many seconds if it says."""

    def __init__(self, error: ApiError, after_s: float = 0.0) -> None:
        self.error = error
        self.after_s = after_s


class Stream:
    """An answer that comes line by line; another thread may break it off."""

    def __init__(self, connection: http.client.HTTPConnection, where: str) -> None:
        self._connection = connection
        self._where = where
        self._response: http.client.HTTPResponse | None = None

    def open(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        """Ask. Raises ApiError."""
        try:
            self._connection.request(method, target, headers=dict(headers))
            self._response = self._connection.getresponse()
            if self._response.status >= 300:
                said = _status_in(self._response.read())
                raise refusal(f"{method} {self._where}", self._response.status, said)
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{method} {self._where}: no answer: {error}") from error

    def __iter__(self) -> Iterator[bytes]:
        """Yield each whole line. Raises ApiError: it broke off, or fell silent."""
        return (line for line in self.pieces() if line.endswith(b"\n"))

    def pieces(self, most: int = -1) -> Iterator[bytes]:
        """Yield each line, in pieces of at most so many bytes, and what there is of the last.

        Raises ApiError: it broke off, or fell silent.
        """
        assert self._response is not None
        try:
            while piece := self._response.readline(most):
                yield piece
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ApiError(f"{self._where}: the answer broke off: {error!r}") from error

    def break_off(self) -> None:
        """End the answer, for whoever reads it, from another thread."""
        sock = self._connection.sock
        if sock is not None:
            try:
                sock.shutdown(2)
            except OSError:
                return  # it has ended by itself

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def load(kubeconfig: str = "", context: str = "", *, patience_s: float = PATIENCE_S) -> Api:
    """Find the API server: by a file, by the usual ones, or as a pod does.

    Raises UsageError: there is none, or the file or the context cannot be used.
    """
    configuration = Configuration()
    try:
        if kubeconfig or context:
            config.load_kube_config(
                kubeconfig or None, context or None, client_configuration=configuration
            )
        else:
            config.load_config(client_configuration=configuration)
    except _UNREADABLE as error:
        what = kubeconfig or "KUBECONFIG, ~/.kube/config, or the service account of a pod"
        raise UsageError(
            f"no Kubernetes cluster: {error} (looked at {what}); give --kubeconfig FILE and "
            "--context NAME"
        ) from error
    return Api(configuration, patience_s=patience_s)


def _decoded(asked: str, data: bytes) -> Object:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ApiError(f"{asked}: the answer is no JSON: {data[:80]!r}") from error
    if not isinstance(found, dict):
        raise ApiError(f"{asked}: the answer is no object: {data[:80]!r}")
    return found


def _status_in(data: bytes) -> Mapping[str, Any]:
    try:
        said = json.loads(data)
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {"message": data.decode(errors="replace")[:200]}


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdigit() else 0.0
