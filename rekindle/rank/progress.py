"""A rank's progress: the step that it does, the state that it holds, heartbeat and step records."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rekindle.console import say
from rekindle.errors import ProtocolError, SessionError
from rekindle.protocol.agent import FormGeneration
from rekindle.protocol.heartbeat_page import HeartbeatPage, RankActivity
from rekindle.recovery.policy.plan import StateSource
from rekindle.states import StateId
from rekindle.writer import END_S, Worker

STEP_LIMIT_S = 0.1  # seconds; the data that the step still needs may be lost with a node
WRITE_S = 1.0  # the rank waits no longer for the write of a step record
MOST_WAITING = 16 << 20  # bytes of step records that wait for the file system

PHASES = {
    "evaluate": RankActivity.EVALUATE,
    "checkpoint": RankActivity.CHECKPOINT,
    "compile": RankActivity.COMPILE,
}


class CurrentStep:
    """The step that the main thread runs. The channel's thread waits for its end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = 0  # threads; each step that nobody awaits ends without the lock
        self._under_way = self._broken = False
        self._finished = 0

    def begin(self) -> None:
        """Record that a step's body begins."""
        self._under_way = True

    @property
    def is_under_way(self) -> bool:
        """Whether a step's body runs."""
        return self._under_way

    def end(self, finished: int) -> None:
        """Record that the step has ended well, and that `finished` steps are finished now."""
        self._finished = finished
        self._under_way = False
        self._notify()

    def break_off(self) -> None:
        """Record that the step raised an error; one that has ended well stays whole."""
        self._broken = self._broken or self._under_way
        self._under_way = False
        self._notify()

    def take_broken(self) -> bool:
        """Return whether a step broke off since the last call."""
        broken, self._broken = self._broken, False
        return broken

    def wait_end(self, finished: int) -> None:
        """Wait, for STEP_LIMIT_S at most, for the end of a step that others have finished.

        finished: the number of steps that they have finished.
        """
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(
                lambda: not self._under_way or self._finished >= finished, STEP_LIMIT_S
            )
            self._waiting -= 1

    def _notify(self) -> None:
        if self._waiting:
            with self._changed:
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The rank's place in the world. slot: its number in the full world, which never changes.

    shard: the shard of the state that it holds; None: all ranks hold the same. shards: the number
    of all shards.

    writes: among the ranks with the same state, this rank writes checkpoints. copied: another node
    keeps copies of its snapshots.

    mesh: the sizes of the device mesh that defines the shards, by dimension name. None: only the
    script knows it.
    """

    slot: int
    shard: int | None = None
    generation: int = 0
    shards: int = 1
    writes: bool = False
    copied: bool = False
    mesh: Mapping[str, int] | None = None

    def moved(self, form: FormGeneration) -> RankPlace:
        """Return the place in the generation that is formed."""
        own = form.plan[self.slot]
        return replace(
            self,
            generation=form.generation,
            shards=form.shards,
            writes=own.writes,
            copied=own.replica_node >= 0,
        )


class HeldState:
    """The step of the state that this process holds.

    finished: its number of steps. generation: the one that did the last of them. whole: the state
    belongs to `finished` steps. torn: the state belongs to no step. Both are false for a state that
    the script has just built.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.generation = 0
        self.whole = False
        self.torn = False

    @property
    def known_steps(self) -> int | None:
        """The number of finished steps; None: the script has just built the state."""
        return self.finished if self.whole or self.torn else None

    def tear(self) -> None:
        """Record that a fault interrupted a change of the state."""
        self.whole, self.torn = False, True

    def step_done(self, step: int, generation: int) -> None:
        """Record that `generation` finished this step."""
        self.finished, self.generation = step, generation

    def replace(self, source: StateSource) -> None:
        """Record that the rank begins to load another state. A failure leaves the state torn."""
        self.whole, self.torn = False, self.torn or source is not StateSource.FRESH

    def hold(self, state: StateId) -> None:
        """Record that the rank holds this state."""
        self.finished, self.generation = state
        self.whole, self.torn = True, False


class Records:
    """Writes the step records of one rank. Without a path it writes no file."""

    def __init__(self, path: Path | None, page: HeartbeatPage, slot: int) -> None:
        self._file = None if path is None else RecordFile(path)
        self._page = page
        self._slot = slot
        self._numbers: tuple[int, dict[str, float]] = (-1, {})  # the newest step, and its numbers
        self._not_finite: set[str] = set()  # the values that were not finite, by name

    def write(self, step: int, generation: int, metrics: Mapping[str, Any]) -> None:
        """Write the record of a step.

        Raises SessionError: a value is not a number, text or list of these, a number has no place
        in 64-bit floating point, or the record is too long.
        """
        record = {
            "step": step,
            "generation": generation,
            "rank": self._slot,
            "at": time.time(),
            "metrics": metrics,
        }
        try:
            new = {name for name, value in metrics.items() if not _require_floats(value)}
            line = msgspec.json.encode(record)
            self._page.put_record(line)
        except (TypeError, ValueError, RecursionError, ProtocolError) as error:
            raise SessionError(f"step.log of step {step}: {error}") from error
        for name in sorted(new - self._not_finite):
            self._not_finite.add(name)
            say(
                f"step {step}: {name} is not finite ({str(metrics[name])[:100]}), and the record "
                f"has null; later values of {name} are not reported"
            )
        self._numbers = step, finite_numbers(metrics)
        if self._file is not None:
            self._file.append(line)

    def numbers_of(self, step: int) -> dict[str, float]:
        """Return the finite numbers that this step has logged; only the newest step is known."""
        return self._numbers[1] if self._numbers[0] == step else {}

    def close(self) -> None:
        """Close the metrics file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class RecordFile:
    """The file of a rank's step records. A thread opens and writes it.

    `append` returns when the record is in the file, so that it survives the death of the process.
    It waits for WRITE_S at most, because the file system may hang. After that it does not wait
    until the thread has written all records. A full disk, or too many records that wait, lose
    records, but do not stop the training.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._torn = False  # the last line is incomplete
        self._late = threading.Event()  # records wait, and `append` does not
        self._queued = self._finished = 0  # bytes; the rank counts the first, the thread the second
        self._loss_reported = False
        self._worker = Worker("rekindle-records")
        opened = threading.Event()
        self._worker.do(functools.partial(self._open, opened))
        opened.wait(WRITE_S)  # a script may use the folder as soon as its Session exists

    def append(self, line: bytes) -> None:
        """Append a line."""
        if self._queued - self._finished > MOST_WAITING:
            self._lose("the file system of the metrics does not answer")
            return
        self._queued += len(line)
        awaited = threading.Lock()  # half the time of an Event, in each step
        awaited.acquire()
        self._worker.do(functools.partial(self._write, line, awaited.release))
        if not self._late.is_set() and not awaited.acquire(timeout=WRITE_S):
            self._late.set()

    def close(self) -> None:
        """Close the file, after all records, or after END_S without progress."""
        self._worker.do(self._close)
        self._worker.close(END_S)

    # ---- in the thread

    def _open(self, opened: threading.Event) -> None:
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, mode, 0o644)
        except OSError as error:
            self._lose(str(error))
        opened.set()

    def _write(self, line: bytes, written: Callable[[], object]) -> None:
        if self._fd >= 0:
            # A line break ends an incomplete line, so that it does not damage other records.
            data = (b"\n" if self._torn else b"") + line + b"\n"
            try:
                self._torn = os.write(self._fd, data) < len(data)
            except OSError as error:
                self._lose(str(error))
        self._finished += len(line)
        written()
        if self._finished == self._queued:
            self._late.clear()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _lose(self, why: str) -> None:
        if not self._loss_reported:
            self._loss_reported = True
            say(f"the rank loses step records: {why}")


class _Record(msgspec.Struct):
    metrics: dict[str, Any]


def numbers_in(record: bytes) -> dict[str, float]:
    """Return the finite numbers of a step record.

    Raises ProtocolError: `Records` has not written it, or only a part of it.
    """
    try:
        return finite_numbers(msgspec.json.decode(record, type=_Record).metrics)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"it is not a step record: {error}") from error


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers. Raises OverflowError: a float cannot hold one."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _require_floats(value: Any) -> bool:
    """Return whether all numbers in the value are finite.

    Raises ValueError: a number is too large for a float. All readers of records use floats: the
    agent, the coordinator, and most readers of JSON.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        try:
            float(value)
        except OverflowError as error:
            raise ValueError(
                f"an integer of {value.bit_length()} bits is too large for a record; log it as "
                "text, or log its logarithm"
            ) from error
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        finite = [_require_floats(each) for each in value]
        return all(finite)
    return True


def phase_of(name: str) -> RankActivity:
    """Return the activity for a phase of a script.

    Raises SessionError: the phase does not exist.
    """
    if name not in PHASES:
        raise SessionError(f"session.phase({name!r}) is unknown; choose from {', '.join(PHASES)}")
    return PHASES[name]


class ProgressReporter:
    """Reports the progress of one rank. total: the number of steps that the script wants."""

    def __init__(self, page: HeartbeatPage) -> None:
        self.page = page
        self.total = 0
        self._first = True  # the next step is the first of its generation

    def _beat(self, finished: int) -> None:
        self.page.beat(finished)
        self.page.begin(RankActivity.BETWEEN)

    def asked_for(self, total: int) -> None:
        """Record the number of steps that the script wants."""
        self.total = total
        self.page.total = total

    def meet(self) -> None:
        """Record that the rank meets the others to form a generation."""
        self.page.begin(RankActivity.MEETING)

    def formed(self, finished: int) -> None:
        """Record that a generation begins after `finished` steps."""
        self._first = True
        self._beat(finished)

    def begin_step(self) -> None:
        """Record that a step's body begins."""
        self.page.begin(RankActivity.FIRST if self._first else RankActivity.STEP)

    def end_step(self, finished: int) -> None:
        """Record that a step is finished."""
        self._first = False
        self._beat(finished)

    def leave(self) -> None:
        """Record that the rank leaves its Session."""
        self.page.begin(RankActivity.OUTSIDE)

    @contextmanager
    def at(self, doing: RankActivity) -> Iterator[None]:
        """Record another activity during a block; afterwards the former one starts again."""
        before = self.page.mark.doing
        self.page.begin(doing)
        try:
            yield
        finally:
            self.page.begin(before)
