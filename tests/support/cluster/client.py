"""A client of any cluster, from a kubeconfig."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import urllib3
import yaml
from waiting import bound_s

Object = dict[str, Any]


class Cluster:
    """A client of the cluster that a kubeconfig names."""

    simulated = False
    time_scale = 1.0

    def __init__(self, kubeconfig: Path) -> None:
        from kubernetes import client, config

        self.kubeconfig = kubeconfig
        configuration = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self.server_url: str = configuration.host
        self.admin = client.ApiClient(configuration)

    def close(self) -> None:
        self.admin.close()
        self.admin.rest_client.pool_manager.clear()

    def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Return code and answer of a request as admin, such as `call("GET", "/api/v1/pods")`."""
        response = self._request(method, path, body, content_type)
        text = response.data.decode()
        with contextlib.suppress(ValueError):
            return response.status, json.loads(text)
        return response.status, text

    def get(self, path: str) -> Object:
        """Return the object or list at this path.

        Raises AssertionError: the server answers with another code than 200.
        """
        code, found = self.call("GET", path)
        assert code == 200, found
        return dict(found)

    def create(self, path: str, thing: Object) -> Object:
        code, made = self.call("POST", path, thing)
        assert code == 201, made
        return dict(made)

    def patch(self, path: str, patch: Any) -> Object:
        """Apply a merge patch and return the changed object."""
        code, found = self.call("PATCH", path, patch, "application/merge-patch+json")
        assert code == 200, found
        return dict(found)

    def delete(self, path: str, **options: Any) -> Any:
        code, found = self.call(
            "DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        )
        assert code in (200, 202), found
        return found

    def until(
        self,
        path: str,
        holds: Callable[[dict[str, Object]], Any],
        timeout: float = 30,
        selector: str = "",
    ) -> Any:
        """Return the first true result of `holds`, which gets the objects of a collection by name.

        It runs at the start and after each change.

        Raises AssertionError: `holds` returns no true result within the timeout.
        """
        limit_s = bound_s(timeout)
        deadline = time.monotonic() + limit_s
        found: dict[str, Object] = {}
        query = f"&labelSelector={selector}" if selector else ""
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                code, listed = self.call("GET", f"{path}?{query}")
                if code != 200:  # a server that has just started
                    time.sleep(0.05)
                    continue
                found = {each["metadata"]["name"]: each for each in listed["items"]}
                if result := holds(found):
                    return result
                version = listed["metadata"]["resourceVersion"]
                left = max(1, int(deadline - time.monotonic()))
                url = f"{path}?watch=1&timeoutSeconds={left}&resourceVersion={version}{query}"
                for kind, thing in self._events(url, left):
                    if kind == "ERROR":
                        break
                    if kind == "DELETED":
                        found.pop(thing["metadata"]["name"], None)
                    else:
                        found[thing["metadata"]["name"]] = thing
                    if result := holds(found):
                        return result
        raise AssertionError(f"not within {limit_s:g} s: {json.dumps(found, indent=1)[-6000:]}")

    def token_for(self, account: str, namespace: str = "default") -> str:
        """Return a token of a service account. If the account does not exist, create it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.call("POST", path, {"metadata": {"name": account}})
        made = self.create(
            f"{path}/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
        )
        return str(made["status"]["token"])

    def kubeconfig_for(self, token: str, path: Path, namespace: str = "default") -> Path:
        """Write a kubeconfig like the client's own, but with another token, and return its path."""
        content = yaml.safe_load(self.kubeconfig.read_text())
        content["users"] = [{"name": "user", "user": {"token": token}}]
        for each in content["contexts"]:
            each["context"].update(user="user", namespace=namespace)
        path.write_text(yaml.safe_dump(content))
        return path

    def scaled(self, seconds: float) -> float:
        """Return the seconds that an operation takes here, from its seconds in a real cluster."""
        return seconds * self.time_scale

    def _request(self, method: str, path: str, body: Any, content_type: str, **more: Any) -> Any:
        configuration = self.admin.configuration
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if token := configuration.get_api_key_with_prefix("BearerToken", alias="authorization"):
            headers["Authorization"] = token
        return self.admin.rest_client.pool_manager.request(
            method,
            self.server_url + path,
            body=None if body is None else json.dumps(body),
            headers=headers,
            retries=False,
            **more,
        )

    def _events(self, path: str, timeout: float) -> Iterator[tuple[str, Object]]:
        limit = urllib3.Timeout(connect=5, read=timeout + 5)
        response = self._request(
            "GET", path, None, "application/json", preload_content=False, timeout=limit
        )
        rest = b""
        try:
            for data in response.stream(None, decode_content=False):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]
        finally:
            response.close()
            response.release_conn()
