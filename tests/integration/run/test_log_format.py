"""`rekindle run --log-format json`: each line of all processes of a job is an object."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from jobs import Place, Run, refuse_agent
from waiting import join

from rekindle.recovery.journal import journal

# Rank 0 prints what a collector cannot read as text. Then the ranks wait, restart once, and fail.
SCRIPT = r"""
import os, sys, time

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and os.environ["RANK"] == "0":
    os.write(1, b"\xff\xfe\x00 no text\n\n")
    os.write(2, b"\x1b[31mred\x1b[0m " + b"\\" * 9_000 + b"\r\n")
    os.write(1, b"x" * 3_000_000)
print("waits", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
raise ValueError("first")
"""
# Each fork server writes to its standard error, not through Python.
CUSTOM = """
import os, sys
if "rekindle.agent.fork_server_process" in sys.orig_argv:
    os.write(2, b"of the fork server\\n")
"""
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Lines]]:
    """Return a job that ran with one pipe for both streams of all its processes, and its lines."""
    output = bytearray()
    read, write = os.pipe()

    def take() -> None:
        while data := os.read(read, 1 << 16):
            output.extend(data)

    reader = threading.Thread(target=take)
    reader.start()
    with Place(tmp_path_factory.mktemp("json") / "place") as place:
        place.script(CUSTOM, "sitecustomize.py")
        options = ("--log-format", "json", "--nnodes", "2", "--max-restarts", "1")
        run = place.start_quick(
            place.script(SCRIPT),
            *options,
            stdout=write,
            stderr=write,
            env=place.environment({"PYTHONPATH": str(place.folder)}),
        )
        os.close(write)
        for rank in (0, 1):
            run.wait_for_output(rank, "waits")
        refuse_agent(run.endpoint(), run.directory.secret())
        os.kill(run.endpoint().pid, signal.SIGKILL)
        run.wait_event(journal.NodeJoined, 4)
        (place.folder / "go").touch()
        run.end(1)
        join(reader)
        os.close(read)
        yield run, [json.loads(each) for each in bytes(output).split(b"\n")[:-1]]


def whole(lines: Lines) -> Lines:
    """Join the parts of each long text."""
    found: Lines = []
    parts: dict[tuple[object, ...], str] = {}
    for line in lines:
        source = tuple(line.get(key) for key in ("process", "node", "rank", "stream"))
        text = parts.pop(source, "") + line["text"]
        if line.get("continues"):
            parts[source] = text
        else:
            found.append(line | {"text": text})
    assert not parts
    return found


def test_each_process_names_itself(lines: tuple[Run, Lines]) -> None:
    """Launcher, coordinator, agents, fork servers and ranks write lines with level and place."""
    _, found = lines
    shown = {(each["process"], each.get("node"), each.get("rank")) for each in found}
    assert shown == {
        ("launcher", None, None),
        ("coordinator", None, None),
        *(("agent", node, None) for node in (0, 1)),
        *(("fork server", node, None) for node in (0, 1)),
        *(("rank", node, node) for node in (0, 1)),
    }
    levels = {each["process"]: each["level"] for each in found}
    assert levels["coordinator"] == levels["agent"] == "WARNING"
    assert {each["level"] for each in found} <= {"INFO", "WARNING", "ERROR"}


def test_hostile_output_of_a_rank(lines: tuple[Run, Lines]) -> None:
    """Bytes that are not text, colours and long lines are in objects, complete and in order."""
    run, found = lines
    of_rank = [each for each in whole(found) if each.get("rank") == 0]
    out = [each["text"] for each in of_rank if each["stream"] == "stdout"]
    assert out[:3] == ["\ufffd\ufffd\0 no text", "", "x" * 3_000_000 + "waits"]
    errors = [each["text"] for each in of_rank if each["stream"] == "stderr"]
    assert errors[0] == "\x1b[31mred\x1b[0m " + "\\" * 9_000 + "\r"
    kept = (run.directory.path / "logs/attempt_0/0/stdout.log").read_bytes()
    assert kept == b"\xff\xfe\x00 no text\n\n" + b"x" * 3_000_000 + b"waits\n"


def test_times_compare_with_the_journal(lines: tuple[Run, Lines]) -> None:
    """The launcher's line about an event follows it; a line about its cause precedes it."""
    run, found = lines

    def at(text: str) -> float:
        time = next(each["time"] for each in whole(found) if text in each["text"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
        return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()

    decided, _ = run.events_of(journal.Decided)
    joined = run.events_of(journal.NodeJoined)
    rounding = 0.001
    assert at("the agent lost its connection") - rounding <= joined[2].at
    assert joined[3].at - rounding <= at("ValueError: first")
    assert at("ValueError: first") - rounding <= decided.at <= at(": restart: ") + rounding


def test_a_text_with_several_lines_is_one_object(lines: tuple[Run, Lines]) -> None:
    """The launcher's last line explains the failure of the job."""
    _, found = lines
    last = [each for each in found if each["process"] == "launcher"][-1]
    assert last["level"] == "ERROR"
    assert last["text"].startswith("the job failed\n  first fault: rank ")
    assert last["text"].splitlines()[-1].startswith("  logs of all ranks: ")
