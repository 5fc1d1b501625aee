"""The client's user and its connection to the API server: commands, files, proxies, TLS."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.launch import Simulated
from cluster.manifests import rules
from servers import between
from stores.servers import certificate

from rekindle.engines.client import ANSWER_S
from rekindle.engines.kubernetes.client.api import Api, load
from rekindle.engines.kubernetes.client.api_errors import ApiError, ForbiddenError
from rekindle.engines.kubernetes.client.informer import Informer
from rekindle.errors import UsageError

pytestmark = pytest.mark.timeout(300)  # a cluster

Object = dict[str, Any]
EXEC = "client.authentication.k8s.io/v1"
LONG_AGO = "2020-01-01T00:00:00Z"


class Someone:
    """Accounts with equal rights, and a kubeconfig for one of them."""

    def __init__(self, server: Simulated, namespace: str, folder: Path) -> None:
        self.server = server
        self.namespace = namespace
        self.folder = folder
        self.maps = f"/api/v1/namespaces/{namespace}/configmaps"
        self.token = folder / "token"
        self._rights = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"]}
        self.become("first")

    def become(self, name: str, left: str = "") -> None:
        """Switch to another account; delete the account that is left, which ends its token."""
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        role, binding = rules(f"look-{name}", name, self.namespace, self._rights)
        self.server.create(f"{rbac}/roles", role)
        self.server.create(f"{rbac}/rolebindings", binding)
        self.token.write_text(self.server.token_for(name, self.namespace))
        if left:
            accounts = f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
            self.server.delete(f"{accounts}/{left}")

    def kubeconfig(self, user: Object, **cluster: Any) -> str:
        """Write a kubeconfig with this user; `cluster` has more fields of the server."""
        content = yaml.safe_load(self.server.kubeconfig.read_text())
        content["users"][0]["user"] = user
        content["clusters"][0]["cluster"] |= cluster
        path = self.folder / "config"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    def command(self, script: str) -> Object:
        """Return a user whose credentials a Python program prints."""
        path = self.folder / "login"
        path.write_text(f"import json, pathlib, sys\n{script}\n")
        how = {"command": sys.executable, "args": [str(path)], "interactiveMode": "Never"}
        return {"exec": {"apiVersion": EXEC, **how}}

    def tells_token(self, expires: str = "") -> Object:
        """Return a user whose program prints the current token."""
        status = {"expirationTimestamp": expires} if expires else {}
        answer = {"apiVersion": EXEC, "kind": "ExecCredential", "status": status}
        return self.command(
            f"answer = json.loads({json.dumps(answer)!r})\n"
            f"answer['status']['token'] = pathlib.Path({str(self.token)!r}).read_text()\n"
            "print(json.dumps(answer))"
        )


@pytest.fixture
def someone(lean: Simulated, space: str, tmp_path: Path) -> Someone:
    return Someone(lean, space, tmp_path)


@pytest.fixture
def loaded() -> Iterator[Callable[[str], Api]]:
    """Return a function that loads a kubeconfig; close its connections after the test."""
    found: list[Api] = []

    def begin(kubeconfig: str) -> Api:
        found.append(load(kubeconfig, patience_s=2.0))
        return found[-1]

    yield begin
    for each in found:
        each.close()


def every_way(api: Api, path: str) -> list[int]:
    """Return the server's answers to a request, to a direct connection, and to a watch."""
    found = [len(api.get(path)["items"])]
    connection = api.way_to(path).connect(ANSWER_S)
    connection.request("GET", "", None, {})
    found.append(connection.getresponse().status)
    connection.close()
    with api.stream(path, silence_s=20.0, watch="true", timeoutSeconds=1) as stream:
        found.append(len(list(stream)))
    return found


def token_in_file(someone: Someone) -> Object:
    return {"tokenFile": str(someone.token)}


@pytest.mark.parametrize(
    "user",
    [token_in_file, Someone.tells_token, lambda someone: someone.tells_token(LONG_AGO)],
    ids=["file", "command", "command that says until when"],
)
def test_a_token_that_changes(
    user: Callable[[Someone], Object], someone: Someone, loaded: Callable[[str], Api]
) -> None:
    """Each kind of request uses the current token after the old one has ended."""
    api = loaded(someone.kubeconfig(user(someone)))
    way, maps = api.way_to(someone.maps), someone.maps
    assert api.get(maps)["items"] == []
    for before, after, ask in (
        ("first", "second", lambda: every_way(api, maps)[0]),
        ("second", "third", lambda: _status(way)),
        ("third", "fourth", lambda: _watched(api, maps)),
    ):
        someone.become(after, left=before)
        assert ask() in (0, 200)
    last = someone.server.calls()[-1]
    assert last["user"].endswith(":fourth")


def _status(way: Any) -> int:
    connection = way.connect(ANSWER_S)
    connection.request("GET", "", None, {})
    try:
        return int(connection.getresponse().status)
    finally:
        connection.close()


def _watched(api: Api, path: str) -> int:
    with api.stream(path, silence_s=20.0, watch="true", timeoutSeconds=1) as stream:
        return len(list(stream))


def test_a_follower_outlives_its_token(someone: Someone, loaded: Callable[[str], Api]) -> None:
    """An informer continues with a new token after its first token has ended."""
    api = loaded(someone.kubeconfig(token_in_file(someone)))
    follower = Informer(api, someone.maps)
    changes = follower.changes()
    api.create(someone.maps, {"metadata": {"name": "a"}})
    assert next(changes)[0]["metadata"]["name"] == "a"
    someone.become("second", left="first")
    someone.server.cut("configmaps")
    someone.server.create(someone.maps, {"metadata": {"name": "b"}})
    assert next(changes)[0]["metadata"]["name"] == "b"
    follower.end()
    changes.close()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("sys.exit('no such profile: research')", "no such profile: research"),
        ("print('hello')", "failed to decode process output"),
        ("print('{}')", "missing key 'apiVersion'"),
        (
            f"print(json.dumps({{'apiVersion': '{EXEC}', 'kind': '', 'status': {{}}}}))",
            "missing token",
        ),
    ],
)
def test_a_command_that_fails(script: str, text: str, someone: Someone) -> None:
    """If the login command fails, the load fails with the command's message."""
    with pytest.raises(UsageError, match=f"the user of the kubeconfig cannot log in: .*{text}"):
        load(someone.kubeconfig(someone.command(script)))


def test_a_command_that_is_not_there(someone: Someone) -> None:
    """The error names a login command that does not exist."""
    user = {"exec": {"apiVersion": EXEC, "command": "/nowhere/login"}}
    with pytest.raises(UsageError, match=r"cannot log in: .*/nowhere/login"):
        load(someone.kubeconfig(user))


def test_a_command_that_fails_later(someone: Someone, loaded: Callable[[str], Api]) -> None:
    """If the login command fails later, the refusal of the old token has the command's message."""
    api = loaded(someone.kubeconfig(someone.tells_token(LONG_AGO)))
    api.unforgiving().get(someone.maps)
    someone.become("second", left="first")
    someone.command("sys.exit('your login has ended')")
    with pytest.raises(
        ForbiddenError, match=r"Unauthorized; the user of the kubeconfig failed: .*login has ended"
    ):
        api.unforgiving().get(someone.maps)


def test_a_kubeconfig_that_is_being_written(someone: Someone, loaded: Callable[[str], Api]) -> None:
    """The client ignores a partial kubeconfig and uses it when it is complete."""
    path = Path(someone.kubeconfig({"token": someone.token.read_text()}))
    api = loaded(str(path))
    api.unforgiving().get(someone.maps)
    someone.become("second", left="first")
    path.write_text("clusters: [{")
    with pytest.raises(ForbiddenError, match="Unauthorized"):
        api.unforgiving().get(someone.maps)
    someone.kubeconfig({"token": someone.token.read_text()})
    assert api.unforgiving().get(someone.maps)["items"] == []


def test_by_a_proxy(someone: Someone, loaded: Callable[[str], Api]) -> None:
    """All requests use the proxy of the kubeconfig."""
    with between.proxy() as proxy:
        user, where = token_in_file(someone), f"http://127.0.0.1:{proxy.port}"
        api = loaded(someone.kubeconfig(user, **{"proxy-url": where}))
        assert every_way(api, someone.maps) == [0, 200, 0]
        assert len(proxy.asked) == 3
        assert all(f"http://127.0.0.1:{someone.server.port}/api" in line for line in proxy.asked)
        api.close()


@pytest.mark.parametrize("spared", ["", "example.com,127.0.0.0/8"])
def test_the_proxy_of_the_environment(
    spared: str, someone: Someone, loaded: Callable[[str], Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests use the proxy of the environment, except to hosts in `no_proxy`."""
    with between.proxy() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", spared)
        api = loaded(someone.kubeconfig(token_in_file(someone)))
        assert every_way(api, someone.maps) == [0, 200, 0]
        assert len(proxy.asked) == (0 if spared else 3)
        api.close()


@pytest.mark.parametrize("by_proxy", [False, True])
def test_a_server_of_another_name(
    by_proxy: bool, someone: Someone, loaded: Callable[[str], Api]
) -> None:
    """With `tls-server-name`, all requests check the certificate against that name."""
    cert, key = certificate(someone.folder, "kubernetes.test")
    target = ("127.0.0.1", someone.server.port)
    with between.tls(target, (str(cert), str(key))) as front, between.proxy() as proxy:
        fields = {
            "server": f"https://127.0.0.1:{front.port}",
            "certificate-authority": str(cert),
            **({"proxy-url": f"http://127.0.0.1:{proxy.port}"} if by_proxy else {}),
        }
        user = token_in_file(someone)
        named = loaded(someone.kubeconfig(user, **fields, **{"tls-server-name": "kubernetes.test"}))
        assert every_way(named, someone.maps) == [0, 200, 0]
        asked = [line.rpartition(" ")[0] for line in proxy.asked]
        assert asked == [f"CONNECT 127.0.0.1:{front.port}"] * 3 * by_proxy
        unnamed = loaded(someone.kubeconfig(user, **fields))
        with pytest.raises(ApiError, match="certificate"):
            unnamed.get(someone.maps)
        with pytest.raises(OSError, match="certificate"):
            _status(unnamed.way_to(someone.maps))
        named.close()
        unnamed.close()
