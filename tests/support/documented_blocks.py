"""Find the code blocks of Markdown pages: complete Python programs, and commands with output."""

from __future__ import annotations

import ast
import builtins
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
from repository import ROOT

_FENCE = re.compile(r"^```(python|diff|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# How much deeper lines are in loops with a Session than before the changes, by their indentation.
_DEEPER = {" " * 20: " " * 8, " " * 12: " " * 4}
_SECTION = re.compile(r"^## ", re.MULTILINE)

# These parts of an output differ between runs.
_VARYING = [
    (re.compile(r"\d+(\.\d+)? (ms|s|min)\b"), "<time>"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"-[0-9a-f]{12}\b"), "-<id>"),
    (re.compile(r"([Ff]low|[Tt]ask) run '[\w-]+'"), r"\1 run <name>"),
    (re.compile(r"stopped by \w+"), "stopped by <user>"),
    (re.compile(r"\d+"), "#"),
    (re.compile(r"\s+"), " "),
]


# The method with which a test runs each complete program, by page and number on the page.
HOW = {
    ("README.md", 0): "python",
    ("docs/deploy/flow.md", 0): "not: README has the same, shorter",
    ("docs/deploy/flow.md", 1): "not: it changes a flow run of the reader",
    ("docs/extend/testing.md", 0): "pytest",
    ("docs/extend/testing.md", 1): "pytest",
    ("docs/extend/testing.md", 2): "not: it reads a job of the reader",
    ("docs/start/first-recovery.md", 0): "walk",
    ("docs/start/first-recovery.md", 1): "kill a rank",
    ("docs/start/first-recovery.md", 2): "walk",
    ("docs/start/first-recovery.md", 3): "walk",
    ("docs/start/install.md", 0): "not: it needs a GPU",
    ("docs/train/data.md", 0): "kill a rank",
    ("docs/train/mindspore.md", 0): "kill a rank of MindSpore",
    ("docs/train/mindspore.md", 1): "not: two lines of a script; test_mindio.py has such scripts",
    ("docs/train/scripts.md", 0): "kill a rank",
    ("docs/train/session.md", 0): "kill a rank",
}


class Program(msgspec.Struct, frozen=True):
    """A Python block that uses only names that it defines. `line` is its first line, from 1."""

    page: str
    line: int
    text: str


class Shown(msgspec.Struct, frozen=True):
    """A command of a console block, with the lines that the page shows after it.

    `command`: "" if the block begins with output.
    """

    command: str
    lines: list[str]


def programs() -> Iterator[Program]:
    """Yield the complete programs of README.md and docs/."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.read_text()
        for found in _FENCE.finditer(page):
            text = new_side(found[2]) if found[1] == "diff" else found[2]
            if found[1] != "console" and is_complete(text):
                line = page[: found.start()].count("\n") + 2
                yield Program(str(path.relative_to(ROOT)), line, text)


def new_side(diff: str) -> str:
    """Return the program after the changes of a diff."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] != "-")


def old_side(diff: str) -> str:
    """Return the program before the changes. The unchanged lines of the new loops are deeper."""
    lines = []
    for line in diff.splitlines(True):
        text = line[1:] or "\n"
        if line[0] not in "+-":
            more = next((m for depth, m in _DEEPER.items() if text.startswith(depth)), "")
            text = text.removeprefix(more)
        if line[0] != "+":
            lines.append(text)
    return "".join(lines)


def program(page: str, number: int) -> str:
    """Return the text of a complete program, by its page and its number on the page."""
    return [each.text for each in programs() if each.page == page][number]


def is_complete(text: str) -> bool:
    """Return whether a block defines or imports all names that it uses, and has no `...`."""
    nodes = list(ast.walk(ast.parse(text)))
    known = set(dir(builtins)) | {"__name__", "__file__"}
    used = set()
    for node in nodes:
        match node:
            case ast.Constant(value=value) if value is ...:
                return False
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                known.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                known.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known |= {each.asname or each.name.partition(".")[0] for each in names}
    return used <= known


def sections(page: Path) -> list[str]:
    """Return the sections of a page that begin with `## `, without the text before the first."""
    return _SECTION.split(page.read_text())[1:]


def program_of(section: str) -> str:
    """Return the first Python block of a section."""
    text: str = next(text for kind, text in _FENCE.findall(section) if kind == "python")
    return text


def console_of(section: str) -> list[list[Shown]]:
    """Return the console blocks of a section."""
    return [_shown(text) for kind, text in _FENCE.findall(section) if kind == "console"]


def shape(line: str) -> str:
    """Return a line of output without the parts that differ between runs."""
    for varying, placeholder in _VARYING:
        line = varying.sub(placeholder, line)
    return line.strip()


def argument(command: str, number: int) -> str:
    """Return one word of a command, by its position."""
    return shlex.split(command)[number]


def _shown(block: str) -> list[Shown]:
    found = [Shown("", [])]
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append(Shown(line[2:], []))
        elif line not in ("...", "^C"):
            found[-1].lines.append(line)
    return [each for each in found if each.command or each.lines]
