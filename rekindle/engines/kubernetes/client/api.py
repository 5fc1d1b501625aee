"""Send requests to Kubernetes' API server, in plain dictionaries, and repeat them within limits.

The official client finds the server and its credentials; the client's pool carries the requests.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import urllib3

from rekindle.engines.client import Transport
from rekindle.engines.kubernetes.client.api_errors import (
    ApiError,
    ForbiddenError,
    refusal,
    status_object_in,
)
from rekindle.engines.kubernetes.client.credentials import Credentials
from rekindle.engines.kubernetes.client.streams import HttpStream, Stream

Object = dict[str, Any]

MANAGER = "rekindle"  # owner of the fields that Rekindle applies
ANSWER_S = 30.0
PAGE = 500  # objects in a page of a list
PATIENCE_S = 60.0  # the restart of a server takes about half of it
# After a restart the server refuses all requests for some seconds, until it has read its rules.
FORBIDDEN_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"
_LATER = (429, 500, 502, 503, 504)
_PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Api:
    """One API server, and the credentials of this process.

    Each request raises ApiError or a subclass. This class repeats a request for `patience_s`
    if the error may pass: no answer, too many requests, or a failure of the server. It repeats a
    refused request for a shorter time, and only if the server accepted an earlier request.
    """

    def __init__(self, credentials: Credentials, *, patience_s: float = PATIENCE_S) -> None:
        self._credentials = credentials
        self._configuration = credentials.configuration
        self._pool = credentials.connections()
        self._patience_s = patience_s
        self._forgiving_s = FORBIDDEN_S
        self._was_let_in = False

    def unforgiving(self) -> Api:
        """Return a client for the same server that reports each refusal immediately."""
        other = copy.copy(self)
        other._forgiving_s = 0.0
        return other

    @property
    def host(self) -> str:
        """Return the URL of the server."""
        return str(self._configuration.host).rstrip("/")

    @property
    def is_inside(self) -> bool:
        """Return whether this process runs in a pod of the cluster and uses its service account."""
        return str(self._configuration.ssl_ca_cert or "").startswith(_SERVICE_ACCOUNT)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    # ---- one object, or a list of objects

    def get(self, path: str, **query: object) -> Object:
        """Read an object or a list."""
        return self._request("GET", path, query)

    def pages(self, path: str, **query: object) -> Iterator[Object]:
        """Read a list of any size, page by page."""
        rest = ""
        while True:
            page = self.get(path, limit=PAGE, **query, **{"continue": rest})
            yield page
            rest = page["metadata"].get("continue") or ""
            if not rest:
                return

    def create(self, path: str, body: Object, **query: object) -> Object:
        """Create an object in a collection."""
        return self._request("POST", path, query, body)

    def patch(self, path: str, body: object, how: str = "merge", **query: object) -> Object:
        """Change an object. how: merge, strategic or json."""
        return self._request("PATCH", path, query, body, _PATCHES[how])

    def apply(self, path: str, body: Object, **query: object) -> Object:
        """Apply an object on the server side: set each field that `body` has."""
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
        """Delete an object and the objects that it owns, or the objects that selectors choose.

        uid: delete the object only if it has this uid. grace_s: for pods; 0 if their host does not
        answer. The body has the propagation policy, because the server ignores the query's
        propagationPolicy if the request has a body.
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
        """Open an answer that arrives line by line.

        It breaks off after `silence_s` without data.
        """
        http = HttpStream(self._credentials, self.host, silence_s)
        stream = Stream(http, f"{self.host}{path}")
        try:
            stream.open("GET", path + _asked(query))
            yield stream
        finally:
            http.close()

    def way_to(self, path: str) -> Transport:
        """Return the route to a coordinator through the server's proxy for services."""
        return Transport(
            connect=lambda limit_s: HttpStream(self._credentials, self.host + path, limit_s),
            where=f"the job's coordinator (through {self.host})",
        )

    # ---- requests

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: object = None,
        kind: str = "application/json",
    ) -> Object:
        began, pause_s, renewed = time.monotonic(), _FIRST_PAUSE_S, False
        while True:
            try:
                answer = self._once(method, path, query, body, kind)
                self._was_let_in = True
                return answer
            except ApiError as error:
                if not error.passing:
                    raise
                if error.status == 401 and self._credentials.renew() and not renewed:
                    renewed = True
                    continue
                waited_s = time.monotonic() - began
                limit_s = self._patience_s
                if isinstance(error, ForbiddenError):
                    limit_s = min(limit_s, self._forgiving_s) if self._was_let_in else 0.0
                if waited_s >= limit_s:
                    raise
                asked_s = error.after_s or random.uniform(0.5, 1.0) * pause_s
                time.sleep(min(asked_s, limit_s - waited_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _once(
        self, method: str, path: str, query: Mapping[str, object], body: object, kind: str
    ) -> Object:
        headers = {"Accept": "application/json", **self._credentials.headers()}
        content = None
        if body is not None:
            headers["Content-Type"], content = kind, json.dumps(body)
        asked = f"{method} {self.host}{path}"
        url = self.host + path + _asked(query)
        try:
            response = self._pool.request(
                method, url, body=content, headers=headers, timeout=ANSWER_S, retries=False
            )
        except urllib3.exceptions.SSLError as error:
            raise ApiError(f"{asked}: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"{asked} got no answer: {error}", passing=True) from error
        if response.status < 300:
            return _decoded(asked, response.data)
        refused = refusal(asked, response.status, status_object_in(response.data))
        if response.status == 401 and (trouble := self._credentials.trouble):
            refused = ForbiddenError(
                f"{refused}; the user of the kubeconfig failed: {trouble}", status=401
            )
        refused.passing = response.status in _LATER or isinstance(refused, ForbiddenError)
        refused.after_s = _seconds(response.headers.get("Retry-After"))
        raise refused


def load(kubeconfig: str = "", context: str = "", *, patience_s: float = PATIENCE_S) -> Api:
    """Find the API server: by a file, by the default files, or as a pod does.

    Raises UsageError: there is no server, or the file, the context or the user is invalid.
    """
    return Api(Credentials(kubeconfig, context), patience_s=patience_s)


def _asked(query: Mapping[str, object]) -> str:
    asked = urlencode({name: value for name, value in query.items() if value not in ("", None)})
    return f"?{asked}" if asked else ""


def _decoded(asked: str, data: bytes) -> Object:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ApiError(f"{asked}: the answer is not JSON, but {data[:80]!r}") from error
    if not isinstance(found, dict):
        raise ApiError(f"{asked}: the answer is not a JSON object, but {data[:80]!r}")
    return found


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdigit() else 0.0


def may(api: Api, verb: str, resource: str, *, group: str = "", namespace: str = "") -> bool:
    """Return whether the server allows this request now. Raises ApiError.

    resource: with its subresource, such as pods/log. namespace: "" for the complete cluster. This
    review is faster than a request: a refused request repeats for half a minute, because the server
    may have restarted.
    """
    plural, _, subresource = resource.partition("/")
    asked = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked | ({"namespace": namespace} if namespace else {})},
    }
    return bool((api.create(_REVIEWS, review).get("status") or {}).get("allowed"))
