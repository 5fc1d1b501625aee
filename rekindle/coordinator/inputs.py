"""The inputs of the state machine. Each of them is one transition, and a bug ends the coordinator.

After a bug the state of the machine may be half changed. So the coordinator does not carry out the
commands of that transition, gives the machine no more inputs, and writes a report of the bug. The
next coordinator computes the state again.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rekindle.console import say
from rekindle.coordinator.machine.job_state import JobState
from rekindle.errors import ProtocolError, UnexpectedError
from rekindle.supervised import write_report

KEPT = 50  # newest inputs that a report has
_LONGEST = 1 << 16  # bytes of an input in a report
_MESSAGE = "message"

T = TypeVar("T")


class Input(msgspec.Struct, frozen=True):
    """One input. kind: message, timer, order, loss, start or stop.

    agent: identifies the connection of the agent that sent or caused the input; 0: no agent.
    """

    at: float
    kind: str
    agent: int
    content: Any


class Inputs:
    """Gives the machine its inputs. bug: the error that ends the coordinator.

    folder: the folder for the report of a bug. carry_out: carries out the commands of the machine.
    end: ends the coordinator.
    """

    def __init__(
        self, folder: Path, job: JobState, carry_out: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._folder, self._job = folder, job
        self._carry_out, self._end = carry_out, end
        self._last: deque[Input] = deque(maxlen=KEPT)
        self.bug: UnexpectedError | None = None

    def message(self, connection: int, message: object, handle: Callable[[], None]) -> None:
        """Give the machine a message of an agent.

        Raises ProtocolError: the agent must not send this message. It has no effect.
        """
        self._give(Input(time.time(), _MESSAGE, connection, message), handle)

    def give(self, kind: str, content: object, handle: Callable[[], T], agent: int = 0) -> T | None:
        """Give the machine another input; return the result of `handle`, or None after a bug."""
        return self._give(Input(time.time(), kind, agent, content), handle)

    def _give(self, given: Input, handle: Callable[[], T]) -> T | None:
        if self.bug is not None:
            return None
        self._last.append(given)
        try:
            result = handle()
        except Exception as error:
            half = self._job.drain()  # its commands must never be carried out
            if isinstance(error, ProtocolError) and given.kind == _MESSAGE and not half:
                raise
            self.fail(error)
            return None
        try:
            self._carry_out()
        except Exception as error:
            self.fail(error)
            return None
        return result

    def fail(self, error: BaseException) -> None:
        """Write a line and a report of this error, and end the coordinator."""
        if self.bug is not None:
            return
        text = str(error) if isinstance(error, UnexpectedError) else repr(error)
        inputs = [msgspec.structs.replace(each, content=_raw(each)) for each in self._last]
        try:
            file = write_report(self._folder, "coordinator", error, inputs)
            where = f"{file} has the stack and the last inputs"
        except OSError as failed:
            where = f"it cannot write its report: {failed}"
            traceback.print_exception(error)
        self.bug = UnexpectedError(f"the coordinator ends, because of a bug: {text}; {where}")
        self.bug.__cause__ = error
        say(str(self.bug), logging.ERROR)  # at once: the launcher may kill a process that ends
        self._end()


def _raw(given: Input) -> msgspec.Raw:
    """Return the content of an input as JSON, or as text if JSON cannot hold it."""
    try:
        encoded = msgspec.json.encode(given.content)
    except Exception:  # the report shows the rest of the inputs
        encoded = b""
    if not encoded or len(encoded) > _LONGEST:
        encoded = msgspec.json.encode(ascii(given.content)[:_LONGEST])
    return msgspec.Raw(encoded)
