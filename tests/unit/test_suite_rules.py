"""Rules for waits in tests: no sleep, no bound and no duration of a test is a constant.

`waiting.py` has the helpers for all of this. Zero is always allowed, because it means no wait.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from repository import ROOT

# These paths, and the files below them, may break the rules, each for its reason.
EXCEPTIONS = {
    "tests/support/waiting.py": "it keeps the rules for all others",
    "tests/support/campaign/moments.py": "faults at random moments",
    "tests/support/habits/common.py": "a step of a script takes a few milliseconds",
    "tests/support/process_faults": "it stops processes for some seconds; and a script",
    "tests/support/cluster": "an imitation: its delays are those of Kubernetes",
    "tests/support/hanging/hook": "a file system that hangs on purpose",
    "tests/support/hanging/journal": "a file system that hangs on purpose",
    "tests/support/checked/slow_device": "a device that is slow on purpose",
    "tests/support/checked/trouble.py": "kills processes again and again, as often as it can",
    "tests/support/stores/proxy.py": "a server that answers late on purpose",
    "tests/support/training_jobs/train.py": "a script: its sleeps are its work",
    "tests/support/training_jobs/resized.py": "a script: it stands still on purpose",
    "tests/support/training_jobs/injection.py": "a script: it hangs and pauses on purpose",
    "tests/support/mindspore_jobs": "scripts: their sleeps are their work",
    "tests/support/suite": "it measures and starts the tests; nothing measures it",
    "tests/integration/checkpoints/test_s3_uploads.py": "kills a writer at random moments",
    "tests/integration/faults/test_hangs.py": "a suspended machine: the test reads the wall clock",
    "tests/integration/faults/test_killed_agent.py": "a child process that outlasts the test",
    "tests/integration/flow/scripts": "scripts: their sleeps are their work",
    "tests/integration/flow/test_flow_kills.py": "kills at random moments",
}

# Constants with these names do not bound a test: a timeout of the product that the test
# awaits, a timeout that outlasts the test, and the pause between two actions of a helper.
_NO_BOUNDS = {"EXPIRES_S", "FOREVER_S", "PACE_S"}
_BOUNDS = {"timeout", "timeout_s", "limit_s"}
_WAITS = {"communicate", "exception", "join", "poll", "result", "settimeout", "wait", "wait_for"}
_CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "process_time", "time", "time_ns"}


def broken_rules(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that break a rule, and the rules."""
    tree = ast.parse(text)
    constants = _constants(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for rule in _of_call(node, constants):
                yield node.lineno, rule
        elif isinstance(node, ast.Compare) and _reads_clock(node):
            yield node.lineno, "a comparison of times"
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _compared_durations(function)


def _of_call(call: ast.Call, constants: set[str]) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    if name == "sleep" and not (call.args and _is_zero(call.args[0])):
        yield "a sleep"
    if name in _WAITS and isinstance(call.func, ast.Attribute):
        # The bound is the last of the arguments.
        if any(_is_bound(each, constants) for each in call.args[-1:]):
            yield f"a constant bound of {name}()"
    for keyword in call.keywords:
        if keyword.arg in _BOUNDS and _is_bound(keyword.value, constants):
            yield f"a constant {keyword.arg}"


def _constants(tree: ast.Module) -> set[str]:
    """Return the names that the module gives to numbers."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and _is_number(node.value):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _is_bound(value: ast.expr, constants: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in constants - _NO_BOUNDS
    return _is_number(value) and not _is_zero(value)


def _is_number(value: ast.expr) -> bool:
    if not isinstance(value, ast.Constant) or isinstance(value.value, bool):
        return False
    return isinstance(value.value, int | float)


def _is_zero(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == 0


def _reads_clock(node: ast.AST) -> bool:
    """Return whether an expression reads a clock."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(isinstance(c.func, ast.Attribute) and c.func.attr in _CLOCKS for c in calls)


def _compared_durations(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Find comparisons of a name that holds the difference of two times."""
    durations = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
        if isinstance(node.value.op, ast.Sub) and _reads_clock(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Name) and side.id in durations for side in sides):
                yield node.lineno, "a comparison of a duration"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("time.sleep(0.1)", ["a sleep"]),
        ("await asyncio.sleep(pause)", ["a sleep"]),
        ("asyncio.sleep(0)", []),
        ("event.wait(10)", ["a constant bound of wait()"]),
        ("event.wait(bound_s())", []),
        ("event.wait(0)", []),
        ("LIMIT_S = 20.0\nthread.join(LIMIT_S)", ["a constant bound of join()"]),
        ("EXPIRES_S = 0.5\nform(timeout_s=EXPIRES_S)", []),
        ("', '.join(words)", []),
        ("asyncio.wait_for(work, 5)", ["a constant bound of wait_for()"]),
        ("subprocess.run(command, timeout=60)", ["a constant timeout"]),
        ("assert time.monotonic() - begin < 5", ["a comparison of times"]),
        ("while time.time() < deadline: pass", ["a comparison of times"]),
        (
            "def f():\n    took = time.monotonic() - begin\n    assert took < other",
            ["a comparison of a duration"],
        ),
    ],
)
def test_the_rules(text: str, rules: list[str]) -> None:
    """The check finds each kind of wait, and accepts allowed waits."""
    assert [rule for _, rule in broken_rules(text)] == rules


def test_no_test_breaks_a_rule() -> None:
    """Outside the exceptions, all waits go through `waiting.py`."""
    found = []
    for path in sorted(ROOT.glob("tests/**/*.py")):
        name = str(path.relative_to(ROOT))
        if not any(f"{name}/".startswith(f"{exception}/") for exception in EXCEPTIONS):
            found += [f"{name}:{line}: {rule}" for line, rule in broken_rules(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", EXCEPTIONS)
def test_each_exception_is_needed(path: str) -> None:
    """Each exception covers a file that breaks a rule."""
    found = ROOT / path
    files = [found] if found.is_file() else found.rglob("*.py")
    assert any(list(broken_rules(file.read_text())) for file in files)
