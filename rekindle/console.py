"""Write the lines with which the processes of Rekindle report.

    short  rekindle agent: TEXT
    long   2026-11-29T09:39:33.123Z WARNING agent node=0: TEXT
    json   {"time": "2026-11-29T09:39:33.123Z", "level": "WARNING", "process": "agent", ...}

A process states once, at its start, which one it is. Before that it is a command, and its lines
are short. In a rank the root logger and the streams belong to the script, so this module leaves
them alone there.
"""

from __future__ import annotations

import enum
import logging
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from logging import ERROR, INFO, WARNING
from typing import NamedTuple

import msgspec

from rekindle import names

AUTO = "auto"  # short on a terminal, long elsewhere
_STREAMS = {1: "stdout", 2: "stderr"}
_FRAME = 512  # bytes of an object without its text, at most


class Form(enum.Enum):
    """The form of a line."""

    SHORT = "short"
    LONG = "long"
    JSON = "json"


class Process(enum.Enum):
    """The process that writes a line. A flow run logs with Prefect's logger instead."""

    COMMAND = "command"
    LAUNCHER = "launcher"
    COORDINATOR = "coordinator"
    AGENT = "agent"
    FORK_SERVER = "fork server"
    RANK = "rank"

    @property
    def prefix(self) -> str:
        """The beginning of its lines in the short form."""
        named = (Process.COORDINATOR, Process.AGENT, Process.FORK_SERVER)
        return f"rekindle {self.value}: " if self in named else "rekindle: "


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line in the JSON form, of at most PIPE_BUF bytes.

    stream: the stream of a process whose output this line shows; empty: the line is Rekindle's.
    continues: the next object of this process and stream has the rest of the text.
    """

    time: str
    level: str
    process: str
    node: int | None = None
    rank: int | None = None
    stream: str = ""
    text: str
    continues: bool = False


class Source(NamedTuple):
    """A stream (1 or 2) of a process whose output an agent shows.

    prefix: the beginning of its lines in the other forms; None: as for lines of Rekindle.
    """

    process: Process
    stream: int
    rank: int | None = None
    prefix: bytes | None = None


def write_some(fd: int, data: memoryview) -> int:
    """Write a part of the data; return its length. The descriptor may be a terminal of others.

    Another process may have set it to not blocking.
    """
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            ready = select.poll()
            ready.register(fd, select.POLLOUT)
            ready.poll()


def write_lines(fd: int, data: memoryview) -> int:
    """Write complete lines that have at most PIPE_BUF bytes together, or such a part of a line.

    The processes of a job share a pipe. The kernel does not mix writes of this size.
    """
    some = data[: select.PIPE_BUF]
    return write_some(fd, some[: bytes(some).rfind(b"\n") + 1 or len(some)])


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[write_lines(fd, left) :]


class _Here(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that this process writes into each of its lines, and its function for writes."""

    process: Process = Process.COMMAND
    form: Form = Form.SHORT
    node: int | None = None
    rank: int | None = None
    write: Callable[[int, bytes], None] = _write_all


_here = _Here()


def say(text: str, level: int = WARNING, fd: int = 2) -> None:
    """Write a line of Rekindle.

    This uses no stream of Python, so a signal handler may call it. A process of a job continues
    without the line if the stream is closed. A command raises OSError.
    """
    try:
        _here.write(fd, line(text, level))
    except OSError:
        if _here.process is Process.COMMAND:
            raise


def line(text: str, level: int = WARNING) -> bytes:
    """Return a text of this process as a line. The long form indents the text's further lines."""
    return _line(text, level, _here.process, _here.rank)


def relayed(text: bytes, source: Source, *, continues: bool = False) -> bytes:
    """Return a line of another process on this node as this process shows it.

    Its level is unknown: INFO. Bytes that are not UTF-8 become U+FFFD in an object; escapes would
    take 0.2 s for a megabyte, and an agent's event loop calls this.
    """
    if _here.form is not Form.JSON and source.prefix is not None:
        return source.prefix + text + b"\n"
    shown = text.decode(errors="replace")
    if _here.form is not Form.JSON:
        return _line(shown, INFO, source.process, source.rank)
    stream = _STREAMS[source.stream]
    return _json(shown, INFO, source.process, source.rank, stream=stream, continues=continues)


def start(process: Process, *, form: str = "", node: int | None = None) -> None:
    """State which process this is, and set the form of its lines and of its child processes.

    form: a value of Form, or AUTO; empty: the one of REKINDLE_LOG_FORMAT, or AUTO. node: as for
    at_node.
    """
    global _here
    asked = form or os.environ.get(names.ENV_LOG_FORMAT) or AUTO
    known = {each.value: each for each in Form}
    chosen = known.get(asked) or (Form.SHORT if os.isatty(2) else Form.LONG)
    os.environ[names.ENV_LOG_FORMAT] = chosen.value
    _here = _Here(process=process, form=chosen)
    at_node(node)
    if asked not in (*known, AUTO):
        choices = f"{', '.join(known)} or {AUTO}"
        say(f"{names.ENV_LOG_FORMAT} is {asked!r}; choose {choices}; Rekindle uses {AUTO}")


def start_rank(environment: Mapping[str, str]) -> None:
    """State that this process is the rank with this environment.

    Its agent makes an object of each line of the rank, and the rank's log files have text. So the
    rank uses the long form instead of JSON.
    """
    global _here
    asked = environment.get(names.ENV_LOG_FORMAT)
    node, rank = (environment.get(name) for name in (names.ENV_NODE_RANK, names.ENV_SLOT))
    _here = _Here(
        process=Process.RANK,
        form=Form.SHORT if asked == Form.SHORT.value else Form.LONG,
        node=int(node) if node else None,
        rank=int(rank) if rank else None,
    )


def at_node(node: int | None) -> None:
    """Write this node rank into further lines; None or names.SPARE: no node."""
    global _here
    _here = msgspec.structs.replace(_here, node=None if node == names.SPARE else node)


def write_with(write: Callable[[int, bytes], None]) -> None:
    """Write further lines with this function: it receives a stream (1 or 2) and complete lines."""
    global _here
    _here = msgspec.structs.replace(_here, write=write)


def catch() -> None:
    """Write all that Python itself prints as lines: tracebacks, warnings, records of libraries.

    Not for a rank, nor for a process with code of users.
    """
    sys.excepthook = lambda kind, error, trace: _report(error)
    threading.excepthook = lambda each: _report(each.exc_value)
    sys.unraisablehook = lambda each: _report(
        each.exc_value, f"{each.err_msg or 'Exception ignored in'}: {each.object!r}\n"
    )
    root = logging.getLogger()
    if not any(isinstance(each, _Handler) for each in root.handlers):
        root.addHandler(_Handler())
    logging.captureWarnings(True)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record).rstrip(), record.levelno)


def _report(error: BaseException | None, before: str = "") -> None:
    if error is not None and not isinstance(error, SystemExit):  # of a thread: its normal end
        sys.stderr.flush()
        say(before + "".join(traceback.format_exception(error)).rstrip(), ERROR)


def _line(text: str, level: int, process: Process, rank: int | None) -> bytes:
    if _here.form is Form.JSON:
        return _json(text, level, process, rank)
    if _here.form is Form.SHORT:
        shown = f"{process.prefix}{text}\n"
    else:
        place = "".join(
            f" {name}={number}"
            for name, number in (("node", _here.node), ("rank", rank))
            if number is not None
        )
        indented = text.replace("\n", "\n    ")
        shown = f"{_now()} {logging.getLevelName(level)} {process.value}{place}: {indented}\n"
    return shown.encode(errors="backslashreplace")


def _json(
    text: str,
    level: int,
    process: Process,
    rank: int | None,
    *,
    stream: str = "",
    continues: bool = False,
) -> bytes:
    whole = Line(
        time=_now(),
        level=logging.getLevelName(level),
        process=process.value,
        node=_here.node,
        rank=rank,
        stream=stream,
        text=text.encode(errors="backslashreplace").decode(),  # JSON has no lone surrogates
        continues=continues,
    )
    data = msgspec.json.encode(whole)
    return data + b"\n" if len(data) < select.PIPE_BUF else b"".join(_parts(whole, len(data)))


def _parts(whole: Line, size: int) -> Iterator[bytes]:
    """Yield objects with parts of a text whose object has `size` bytes."""
    at, text = 0, whole.text
    most = len(text) * (select.PIPE_BUF - _FRAME) // size  # characters: a first estimate
    while at < len(text):
        length = most
        while True:
            end = at + length
            continues = whole.continues or end < len(text)
            part = msgspec.structs.replace(whole, text=text[at:end], continues=continues)
            data = msgspec.json.encode(part)
            if len(data) < select.PIPE_BUF:  # a line end follows
                break
            length //= 2
        yield data + b"\n"
        at = end


def _now() -> str:
    now = datetime.now(timezone.utc)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
