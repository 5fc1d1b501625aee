"""The agent's event loop does not wait for files: its functions call nothing that may.

Ruff finds such calls in coroutines. This test also finds them in callbacks of the loop, and in
functions that a coroutine calls.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

AGENT = ROOT / "rekindle" / "agent"
# These modules are programs of other processes, without an event loop.
PROGRAMS = {"fork_server_process", "devices.dcmi"}

_THREAD = "it runs in a thread"
_KERNEL = "the kernel answers from memory"
# These functions may wait for a file, each for its reason.
ALLOWED = {
    "devices.tools.has_gpus": "/dev is in memory",
    "devices.tools.has_npus": "/dev is in memory",
    "devices.tools.read_condition": _THREAD,
    "fork_server.Child._ended": "the kernel has reported the end of the process",
    "fork_server.ForkServer.__init__": (
        "CPython holds its lock until the new process has executed the program, so a thread would "
        "not help; the program is the interpreter of this process"
    ),
    "leftovers._all_processes": _KERNEL,
    "leftovers.children": _KERNEL,
    "leftovers.cleans": _KERNEL,
    "leftovers.end_descendants": _THREAD,
    "leftovers.end_helpers": _THREAD,
    "leftovers.has_marks": _THREAD,
    "memory_limits._number": _KERNEL,
    "memory_limits.memory_cgroups": _KERNEL,
    "memory_limits.read_lines": _KERNEL,
    "checkers.NodeCheckRunner._start": "it opens no file: `open` waits for a message",
    "output._make": _THREAD,
    "output.open_logs": _THREAD,
    "process_activity._io_bytes": _THREAD,
    "process_activity._process": _THREAD,
    "process_activity._waits": _THREAD,
    "process_activity.activities": _THREAD,
    "process_activity.states": _THREAD,
    "rank_process.RankProcess.error": _THREAD,
    "rank_process.names_session": _THREAD,
    "stacks._ask": _THREAD,
    "stacks._py_spy": _THREAD,
    "stacks._size": _THREAD,
    "watchdog.OomCounter.__init__": _KERNEL,
}
IN_THREADS = {name for name, reason in ALLOWED.items() if reason == _THREAD}

_FUNCTIONS = {
    *("open", "print", "input", "time.sleep", "sys.stdout.write", "sys.stderr.write"),
    *(f"os.{name}" for name in ("access", "chmod", "fdatasync", "fsync", "link", "listdir")),
    *(f"os.{name}" for name in ("lstat", "makedirs", "mkdir", "open", "popen", "readlink")),
    *(f"os.{name}" for name in ("remove", "rename", "replace", "rmdir", "scandir", "stat")),
    *(f"os.{name}" for name in ("statvfs", "symlink", "system", "truncate", "unlink", "utime")),
    *("os.waitpid", "os.walk", "os.write"),
    # Functions of the package that read or write the job directory or a store.
    *("age", "events_in", "is_over", "open_store", "self._directory.spec", "directory.spec"),
    *("directory.secret", "directory.endpoint", "write_lines", "write_some", "self._write_some"),
}
_MODULES = ("shutil.", "subprocess.", "tempfile.", "os.path.exists", "os.path.is", "os.path.real")
_METHODS = {  # of a path
    *("chmod", "exists", "glob", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir"),
    *("open", "read_bytes", "read_text", "readlink", "resolve", "rglob", "rmdir", "samefile"),
    *("stat", "symlink_to", "touch", "unlink", "write_bytes", "write_text"),
}


def calls(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.Call, bool]]:
    """Yield each call, with the name of its function and whether the caller awaits it."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            around, names = parents.get(node), list[str]()
            while around is not None:
                if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.insert(0, around.name)
                around = parents.get(around)
            awaited = isinstance(parents.get(node), ast.Await)
            yield ".".join((function, *names)), node, awaited


def may_wait(call: ast.Call) -> bool:
    """Return whether a call may wait for a file, a stream or a program."""
    called = ast.unparse(call.func)
    of_a_path = isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS
    # Not os.waitpid(pid, os.WNOHANG).
    at_once = any("WNOHANG" in ast.unparse(argument) for argument in call.args)
    return (of_a_path or called in _FUNCTIONS or called.startswith(_MODULES)) and not at_once


def waits(module: str, text: str) -> list[str]:
    """Return the functions of a module that may wait, with the line and the call."""
    threads = {name.rpartition(".")[2] for name in IN_THREADS}
    found = []
    for function, call, awaited in calls(ast.parse(text), module):
        passed_on = isinstance(call.func, ast.Name) and call.func.id in threads
        if (may_wait(call) and not awaited) or (passed_on and function not in IN_THREADS):
            found.append(f"{function} {call.lineno} {ast.unparse(call.func)}")
    return found


def modules() -> dict[str, Path]:
    """Return the modules of the agent's process, by their name below the package."""
    paths = sorted(AGENT.rglob("*.py"))
    named = {".".join(path.relative_to(AGENT).with_suffix("").parts): path for path in paths}
    return {name: path for name, path in named.items() if name not in PROGRAMS}


@functools.cache
def all_waits() -> list[str]:
    """Return all functions of the agent's process that may wait."""
    return [each for name, path in modules().items() for each in waits(name, path.read_text())]


def test_no_function_waits() -> None:
    assert [each for each in all_waits() if each.split()[0] not in ALLOWED] == []


@pytest.mark.parametrize("function", ALLOWED)
def test_each_exception_is_needed(function: str) -> None:
    assert function in {each.split()[0] for each in all_waits()}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("async def f():\n    path.read_bytes()", ["m.f 2 path.read_bytes"]),
        ("class C:\n    def f(self):\n        print()", ["m.C.f 3 print"]),
        ("def f():\n    return lambda: os.open(path, 0)", ["m.f 2 os.open"]),
        ("async def f():\n    await in_thread(path.read_bytes)", []),
        ("async def f():\n    await output.open(rank)", []),
        ("async def f():\n    open_logs(path)", ["m.f 2 open_logs"]),
        ("async def f():\n    await in_thread(open_logs, path)", []),
        ("async def f():\n    spec = directory.spec()", ["m.f 2 directory.spec"]),
        ("def f():\n    shutil.which('py-spy')", ["m.f 2 shutil.which"]),
        ("def f():\n    os.waitpid(1, 0)", ["m.f 2 os.waitpid"]),
        ("def f():\n    os.waitpid(1, os.WNOHANG)", []),
    ],
)
def test_what_counts_as_a_wait(text: str, found: list[str]) -> None:
    assert waits("m", text) == found
