"""The lines of Rekindle's processes: three forms, hostile texts, and shared pipes."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from datetime import datetime, tzinfo
from typing import Any

import pytest
from waiting import run_command

from rekindle import console, names
from rekindle.console import Form, Process, Source, line, relayed, say, start, start_rank

RANK = Source(Process.RANK, stream=2, rank=3, prefix=b"[default3]:")
FORK_SERVER = Source(Process.FORK_SERVER, stream=1)
HOSTILE = (
    "",
    "plain",
    "a\nb\r\nc",
    "\x1b[31mred\x1b[0m \0\x7f\u2028",
    '{"time": "not ours"}',
    "\udcff lone",
    "x" * 50_000,
    "\x01" * 50_000,
    "\u20ac\U0001f600" * 20_000,
    '\\"' * 30_000,
    "\n" * 10_000,
    ("a" * 3_000 + "\x01" * 3_000) * 10,
)


@pytest.fixture(autouse=True)
def no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the tests states no form."""
    monkeypatch.setenv(names.ENV_LOG_FORMAT, "")


def objects(data: bytes) -> list[dict[str, Any]]:
    """Decode complete lines. A pipe does not mix lines of this length with others."""
    *lines, rest = data.split(b"\n")
    assert rest == b""
    assert max(map(len, lines)) < select.PIPE_BUF
    return [json.loads(each) for each in lines]


def test_the_short_form() -> None:
    """The prefix names the process; a command, a launcher and a rank have the same one."""
    shown = {}
    for process in Process:
        start(process, form="short", node=0)
        shown[process] = line("text\nmore").decode()
    own = ("coordinator", "agent", "fork server")
    for process, text in shown.items():
        prefix = f"rekindle {process.value}: " if process.value in own else "rekindle: "
        assert text == f"{prefix}text\nmore\n"


def test_the_long_form() -> None:
    """A line has time, level, process and place; the further lines of a text are indented."""
    start(Process.AGENT, form="long", node=names.SPARE)
    assert re.fullmatch(rb"\S{23}Z WARNING agent: text\n", line("text"))
    console.at_node(2)
    assert re.fullmatch(rb"\S+Z ERROR agent node=2: text\n    more\n", line("text\nmore", 40))
    assert re.fullmatch(rb"\S+Z INFO fork server node=2: \S+\n", relayed(b"\xff", FORK_SERVER))
    assert relayed(b"\xff\r", RANK) == b"[default3]:\xff\r\n"


class Clock(datetime):
    """A clock that has stopped 1.5 s after the epoch."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.fromtimestamp(1.5, tz)


def test_the_json_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is one object with the same facts. Its time is in UTC."""
    start(Process.AGENT, form="json", node=2)
    monkeypatch.setattr(console, "datetime", Clock)
    (found,) = objects(line("text\nmore", 20))
    assert found.pop("time") == "1970-01-01T00:00:01.500Z"
    facts = {"level": "INFO", "process": "agent", "node": 2}
    assert found == facts | {"text": "text\nmore"}
    (found,) = objects(relayed(b"bytes \xff", RANK))
    del found["time"]
    shown = {"process": "rank", "rank": 3, "stream": "stderr", "text": "bytes \ufffd"}
    assert found == facts | shown


@pytest.mark.parametrize("text", HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
def test_hostile_texts_are_objects(text: str) -> None:
    """Each text is one or several objects. All except the last say that the text continues."""
    start(Process.AGENT, form="json")
    clean = text.encode(errors="backslashreplace")
    for data in (line(text), relayed(clean, RANK)):
        found = objects(data)
        assert "".join(each["text"] for each in found) == clean.decode()
        assert [each.get("continues", False) for each in found] == [
            *[True] * (len(found) - 1),
            False,
        ]
    assert objects(relayed(clean, RANK, continues=True))[-1]["continues"]


def test_a_rank_writes_text() -> None:
    """Log files of ranks have text, also if the agent makes objects of it."""
    place = {names.ENV_NODE_RANK: "1", names.ENV_SLOT: "5"}
    for form, text in (("short", rb"rekindle: "), ("json", rb"\S+Z WARNING rank node=1 rank=5: ")):
        start_rank(place | {names.ENV_LOG_FORMAT: form})
        assert re.fullmatch(text + b"text\n", line("text"))


def test_the_form_of_child_processes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An option precedes the variable. Child processes get the form of their parent."""
    for option, variable, terminal, form in (
        ("", "", True, Form.SHORT),
        ("", "", False, Form.LONG),
        ("", "json", True, Form.JSON),
        ("long", "json", True, Form.LONG),
        ("auto", "json", True, Form.SHORT),
    ):
        monkeypatch.setenv(names.ENV_LOG_FORMAT, variable)
        monkeypatch.setattr(os, "isatty", lambda fd, terminal=terminal: terminal)
        start(Process.LAUNCHER, form=option)
        assert (console._here.form, os.environ[names.ENV_LOG_FORMAT]) == (form, form.value)
    monkeypatch.setenv(names.ENV_LOG_FORMAT, "xml")
    start(Process.AGENT)
    text = "rekindle agent: REKINDLE_LOG_FORMAT is 'xml'; choose short, long, json or auto; "
    assert capfd.readouterr().err == f"{text}Rekindle uses auto\n"


def test_a_closed_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a job continues without the line; a command reports the error."""

    def closed(fd: int, data: bytes) -> None:
        raise BrokenPipeError

    start(Process.COORDINATOR)
    console.write_with(closed)
    say("text")
    start(Process.COMMAND)
    console.write_with(closed)
    with pytest.raises(BrokenPipeError):
        say("text")


ALL = """
import logging, sys, threading, warnings
from rekindle.console import Process, catch, say, start
start(Process.COORDINATOR, form="json")
catch()
say("said")
warnings.warn("warned")
logging.getLogger("a library").error("logged", exc_info=ValueError("of a library"))
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
class Odd:
    def __del__(self):
        raise KeyError("deleted")
Odd()
raise RuntimeError("last\\nof all")
"""


@pytest.mark.process
def test_all_that_python_prints_are_lines() -> None:
    """Warnings, records of libraries and tracebacks of all threads are one object each."""
    done = run_command([sys.executable, "-c", ALL])
    found = objects(done.stderr.encode())
    assert [each["level"] for each in found] == [
        *("WARNING", "WARNING", "ERROR", "ERROR", "ERROR", "ERROR"),
    ]
    words = ["said", "warned", "of a library", "ZeroDivisionError", "deleted", "last\nof all"]
    assert all(word in each["text"] for word, each in zip(words, found, strict=True))
    assert done.returncode == 1


SHARED = """
import sys
from rekindle.console import Process, say, start
start(Process.AGENT, form="json", node=int(sys.argv[1]))
for number in range(300):
    say("x" * 20_000)
"""


@pytest.mark.process
def test_processes_that_share_a_pipe() -> None:
    """The lines of several processes on one pipe stay whole."""
    read, write = os.pipe()
    command = [sys.executable, "-c", SHARED]
    writers = [subprocess.Popen([*command, str(node)], stderr=write) for node in (0, 1, 2)]
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        found = objects(stream.read())
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    for node in (0, 1, 2):
        text = "".join(each["text"] for each in found if each["node"] == node)
        assert text == "x" * 300 * 20_000
