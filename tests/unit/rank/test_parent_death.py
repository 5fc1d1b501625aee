"""A process ends with its parent, whenever the parent dies."""

from __future__ import annotations

import sys

import pytest
from waiting import run_command

_CHILD = """
import os, select, sys
from rekindle.rank.program import die_with_parent, outlive_parent

parent, when = int(sys.argv[1]), sys.argv[2]
death = os.pidfd_open(parent)
if when != "before":
    die_with_parent(parent)
if when == "undone":
    outlive_parent()
print("ready", file=sys.stderr, flush=True)
select.select([death], [], [])  # the kernel sends the child's signal before it returns
if when == "before":
    print("calls", flush=True)
    die_with_parent(parent)
print("lives", flush=True)
"""
_PARENT = """
import os, signal, subprocess, sys

when, code = sys.argv[1:]
command = [sys.executable, "-c", code, str(os.getpid()), when]
child = subprocess.Popen(command, stderr=subprocess.PIPE)
child.stderr.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("when", "lines"), [("before", ["calls"]), ("after", []), ("undone", ["lives"])]
)
@pytest.mark.process
def test_a_process_ends_with_its_parent(when: str, lines: list[str]) -> None:
    """The child ends if its parent dies before or after the call, unless it undid the call."""
    ended = run_command([sys.executable, "-c", _PARENT, when, _CHILD])  # until the child ends too
    assert ended.stdout.splitlines() == lines
