"""A rank as a member of generations: it arrives, waits, forms the next generation, and reports.

This module knows no framework. An adapter does what differs between frameworks: it connects the
ranks, brings the state to the planned step, and wakes the main thread when a generation ends.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rekindle.errors import CheckpointError, RekindleError, SessionError
from rekindle.protocol.heartbeat_page import StateDigest
from rekindle.protocol.rank import (
    Arrived,
    Cause,
    EndSession,
    FormGeneration,
    GenerationEnded,
    Paused,
    StateReady,
    StepDone,
    StepFailed,
    StepLeftOut,
)
from rekindle.rank import sources
from rekindle.rank.channel import Channel
from rekindle.rank.error_origin import all_of
from rekindle.rank.progress import HeldState, ProgressReporter
from rekindle.recovery.faults.fault import FaultKind
from rekindle.states import StateId

_LONGEST_TEXT = 500  # characters
_CANN = re.compile(r"\bE[A-Z]\d{4}\b|\bERR\d{5}\b")
_log = logging.getLogger(__name__)
NOWHERE = -1  # a value of Member.stands: only a new process can continue
NOTICE_S = 2.0  # A rank receives the news of a peer's end within this time.


class UnusableError(RekindleError):
    """Only a new process can use the device of this rank again."""


def text_of(error: BaseException) -> str:
    """Return the type and the first line of an error, and its lines with codes of CANN.

    In at most 500 characters.
    """
    first, *rest = str(error).splitlines() or [""]
    lines = [first, *(line.strip() for line in rest if _CANN.search(line))]
    text = f"{type(error).__name__}: {' / '.join(lines)}".removesuffix(": ")[:_LONGEST_TEXT]
    # A text can contain a file name that is not UTF-8.
    return text.encode(errors="backslashreplace").decode()


def free_frames(error: BaseException) -> None:
    """Free what the functions of the broken step hold: its activations, works and groups.

    A torch.futures.Future that raised an error keeps it in a cycle that the garbage collector does
    not see (torch 2.13), and the error keeps each frame that it passed through. So the errors lose
    their tracebacks. The frames are cleared too, because an object of the script may hold one. It
    would keep the dictionary of a frame's locals, which clear() leaves full up to Python 3.12.
    """
    for each in all_of(error):
        traceback.clear_frames(each.__traceback__)  # skips frames that still run
        each.__traceback__ = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """The values that the framework adds to `Arrived`; the message has the same fields."""

    done: bool
    shard: int | None = None
    valid_steps: int | None = None
    port: int = 0
    needs_peer: bool = False
    replicas: int = 0
    items: tuple[str, ...] = ()
    digests: tuple[StateDigest, ...] = ()
    tensors: Mapping[str, int] = field(default_factory=dict)
    compared: int = 0
    own: tuple[StateId, ...] | None = None


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a script's hook learns about a recovery.

    when: `before` (the rank has left its step) or `after` (it has the state from which it
    continues). A new process gets only `after`.

    kind: the kind of the fault. Without a fault: `join` (nodes join the world), `node-check` (slow
    nodes are checked) or `planned` (a node moves). strategy: how the job answers. It is empty
    without a fault, and may be empty `before`, because the job decides later.

    ranks: the ranks that failed or get new processes, by their slots. finished: the finished steps
    of this rank.
    """

    when: str
    kind: str
    strategy: str
    ranks: tuple[int, ...]
    finished: int


class GenerationAdapter(Protocol):
    """The framework's part in a generation.

    The channel's thread calls the function that `enter` returns. All else runs in the main thread.
    """

    def arrival(self) -> Arrival:
        """Return what the framework adds to `Arrived`."""

    def recover(self) -> None:
        """Make the device usable if the last generation has ended.

        Member calls it before the rank arrives, and again before it forms a generation.
        Raises UnusableError: only a new process can use the device.
        """

    def enter(self, form: FormGeneration) -> Callable[[GenerationEnded], None]:
        """Leave the group of the former generation, and prepare this one.

        Returns a function that wakes the main thread when the generation ends. The channel's thread
        calls it.
        """

    def form(self, form: FormGeneration) -> None:
        """Connect to the other ranks, and bring the state to the planned one.

        Raises CheckpointError: the planned source does not have the planned state. Any other
        exception goes to `failed`.
        """

    def failed(self, error: BaseException) -> FaultKind | None:
        """Return the kind of fault that broke `form`; None: the framework cannot name it."""


class Member:
    """One rank in the generations of its job.

    channel: the connection to the agent.

    on_recovery: the script's hook, which the main thread calls before and after each recovery.

    slot: the rank's number in the full world. Messages and the journal call it `rank`.

    generation: the newest generation that the rank entered; 0: none.

    dismissed: the coordinator has let all ranks leave since the last call of `join`.
    ended_step: the finished steps at that time.

    stands: as in Arrived. A rank that cannot continue from the planned step gets a new process.
    """

    def __init__(
        self,
        channel: Channel,
        slot: int,
        progress: ProgressReporter,
        state: HeldState,
        framework: GenerationAdapter,
        on_recovery: Callable[[Recovery], object] | None = None,
    ) -> None:
        self.channel = channel
        self.slot = slot
        self.state = state
        self.generation = 0
        self.session_ended = False
        self.ended_step = 0
        self.stands: int | None = None
        self._progress = progress
        self._framework = framework
        self._on_recovery = on_recovery
        self._stepped = True  # this generation has finished a step

    @property
    def is_over(self) -> bool:
        """Whether the coordinator has ended this rank's generation."""
        return self.channel.is_over(self.generation)

    @property
    def is_held(self) -> bool:
        """Whether the agent wants this rank to pause before the next step."""
        return self.channel.is_held(self.generation)

    def join(self) -> bool:
        """Arrive, and form generations until one succeeds; False: all ranks have finished.

        Raises the script's own error, if that breaks the forming.
        """
        if self.generation and self.is_over:
            self._tell("before", self.channel.over_cause)
        while True:
            self._recover()
            self._progress.meet()
            self.channel.send(self._arrived())
            message = self.channel.wait(self.generation)
            if isinstance(message, GenerationEnded):
                continue  # the rank arrives again, with the digests of its tensors
            self.session_ended = isinstance(message, EndSession)
            if isinstance(message, EndSession):
                self.ended_step = message.finished
                self._progress.leave()
                return False
            self._recover()  # while the rank waited, a peer's fault may have stopped its device
            if self._form(message):
                self._tell("after", message.cause)
                return True

    def _tell(self, when: str, cause: Cause | None) -> None:
        """Call the script's hook."""
        if self._on_recovery is not None and cause is not None:
            finished = self.state.finished
            self._on_recovery(Recovery(when, cause.kind, cause.strategy, cause.ranks, finished))

    def step_done(self) -> None:
        """Report the first finished step of the generation."""
        if not self._stepped:
            self._stepped = True
            self.channel.send(
                StepDone(rank=self.slot, generation=self.generation, finished=self.state.finished)
            )

    def step_skipped(self, reason: str) -> None:
        """Report that all ranks skip the present step."""
        self.channel.send(
            StepLeftOut(
                rank=self.slot,
                generation=self.generation,
                step=self.state.finished,
                reason=reason,
            )
        )

    def hold(self) -> bool:
        """Between two steps: if the agent asks for a pause, wait for the generation's end.

        Returns whether the rank has paused.
        """
        if self.is_held:
            finished = self.state.finished
            self.channel.send(Paused(rank=self.slot, generation=self.generation, finished=finished))
            self.channel.wait_over(self.generation)
            return True
        return False

    def report(self, kind: FaultKind, error: str, *, own: bool = False) -> None:
        """Report the fault that broke the step.

        own: the end of a generation cannot cause this fault, so that the rank reports it even
        when its generation has ended. Damaged device memory is always such a fault.
        """
        if own or kind is FaultKind.DEVICE_MEMORY or not self.is_over:
            self.channel.send(
                StepFailed(
                    rank=self.slot,
                    generation=self.generation,
                    kind=kind,
                    error=error,
                    finished=self.state.finished,
                    valid_steps=self._framework.arrival().valid_steps,
                )
            )

    def break_off(self, kind: FaultKind | None, error: BaseException) -> None:
        """Report the fault that broke the step, and wait until the generation has ended.

        kind: None for an unknown error in a generation that has ended. The end of the generation
        is the likely cause, so the rank does not report it. The log shows every other error,
        because an error of the script may look like a fault.
        """
        explained = kind is not None and self.is_over
        self.report(kind or FaultKind.LINK, text_of(error))
        if not explained:
            what = kind.value if kind is not None else "unknown"
            text = "step %d broke (%s); rank %d forms the next generation"
            _log.warning(text, self.state.finished, what, self.slot, exc_info=error)
        self.channel.wait_over(self.generation)
        free_frames(error)

    def _recover(self) -> None:
        try:
            self._framework.recover()
        except UnusableError as error:
            self.report(FaultKind.DEVICE, str(error), own=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def _arrived(self) -> Arrived:
        arrival = self._framework.arrival()
        return Arrived(
            rank=self.slot,
            generation=self.generation,
            finished=self.state.known_steps,
            torn=self.state.torn,
            state_generation=self.state.generation,
            ended_step=self.ended_step,
            done=arrival.done,
            shard=arrival.shard,
            valid_steps=arrival.valid_steps,
            port=arrival.port,
            needs_peer=arrival.needs_peer,
            stands=self.stands,
            sources=sources.digests(),
            replicas=arrival.replicas,
            items=arrival.items,
            digests=arrival.digests,
            tensors=dict(arrival.tensors),
            compared=arrival.compared,
            own=arrival.own,
        )

    def _form(self, form: FormGeneration) -> bool:
        """Form this generation; False: it has ended already."""
        stop = self._framework.enter(form)
        self.generation = form.generation
        self.ended_step = max(self.ended_step, form.ended_step)
        self.channel.on_over = functools.partial(self._on_over, stop)
        if self.is_over:
            return False
        try:
            self._framework.form(form)
        except CheckpointError as error:
            self._ready(str(error))
            self.channel.wait_over(form.generation)
            return False
        except Exception as error:
            self._on_failed_form(error)
            return False
        self._stepped = False
        self._progress.formed(self.state.finished)
        self._ready()
        return True

    def _ready(self, error: str = "") -> None:
        """Report that the rank has its state, or why it does not."""
        ready = StateReady(
            rank=self.slot, generation=self.generation, finished=self.state.finished, error=error
        )
        self.channel.send(ready)

    def _on_failed_form(self, error: Exception) -> None:
        kind = self._framework.failed(error)
        if kind is None:
            # A framework's own collectives can fail before this rank hears that a peer has died.
            ours = isinstance(error, SessionError)
            if ours or not self.channel.is_over_within(self.generation, NOTICE_S):
                raise error
        self.break_off(kind, error)

    def _on_over(self, stop: Callable[[GenerationEnded], None], over: GenerationEnded) -> None:
        if over.generation >= self.generation:
            stop(over)
