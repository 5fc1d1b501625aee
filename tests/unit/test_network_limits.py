"""Each call that waits for another machine has a limit that a reader can see beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from repository import ROOT

# Calls that wait for a connection, a name or an answer.
_WAITS = {
    "HTTPConnection",
    "create_connection",
    "getaddrinfo",
    "open_connection",
    "sock_connect",
    "unary_unary",
    "urlopen",
    "ws_connect",
}
PACKAGE = ROOT / "rekindle"
_LIMITS = {"wait_for", "within"}


def unlimited(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each call that waits without a visible limit."""
    tree = ast.parse(text)
    limited = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) in _LIMITS:
            limited |= {node.args[0], *_values(tree, node.args[0])}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _name(node) not in _WAITS or node in limited:
            continue
        outer = [
            each for each in ast.walk(tree) if isinstance(each, ast.Call) and each.func is node
        ]
        keywords = [each.arg for call in (node, *outer) for each in call.keywords]
        if "timeout" not in keywords:
            yield node.lineno, _name(node)


def _name(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _values(tree: ast.AST, name: ast.expr) -> Iterator[ast.expr]:
    """Yield what the module assigns to a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(name, ast.Name):
            if any(isinstance(each, ast.Name) and each.id == name.id for each in node.targets):
                yield node.value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("socket.create_connection(address)", ["create_connection"]),
        ("socket.create_connection(address, timeout=5)", []),
        ("await session.ws_connect(url)", ["ws_connect"]),
        ("await asyncio.wait_for(session.ws_connect(url), LIMIT_S)", []),
        ("named = loop.getaddrinfo(host, 1)\nawait within(named, LIMIT_S)", []),
        ("channel.unary_unary(NAME)(body, timeout=LIMIT_S)", []),
    ],
)
def test_the_check(text: str, found: list[str]) -> None:
    assert [name for _, name in unlimited(text)] == found


def test_each_call_has_a_limit() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        found += [f"{name}:{line}: {call}" for line, call in unlimited(path.read_text())]
    assert not found, "\n".join(found)
