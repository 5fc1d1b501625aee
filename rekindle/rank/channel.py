"""A rank's connection to its agent, with a thread that listens while the rank computes."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable

from rekindle.console import say
from rekindle.errors import ProtocolError
from rekindle.protocol.agent import (
    BufferGrant,
    Cause,
    EndSession,
    FormGeneration,
    GenerationEnded,
    Inject,
    Message,
    PauseRequest,
    Settings,
    decode_to_rank,
    encode,
)
from rekindle.rank import earlier_files, environment, injection
from rekindle.states import StateId

MAX_MESSAGE = 128 * 1024


class Channel:
    """The connection to the agent.

    The listening thread never depends on the main thread. At the end of a generation it calls
    `on_over` itself (to sever the collectives) and remembers the generation. Most other messages
    wait in a queue.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answered = threading.Condition()
        self._answers: dict[int, tuple[BufferGrant, list[int]]] = {}  # by serial number
        self._unwanted: set[int] = set()
        self._over = -1
        self._settled = -1  # the same, once `on_over` has done its work
        self._held = -1  # the newest generation that must pause between two steps
        self.over_cause: Cause | None = None  # why the newest ended generation ended
        self.compared: StateId | None = None  # the state whose digests its end asks for
        self.settings = Settings()
        self.injected: list[Inject] = []  # faults to inject; each user empties the list
        self.on_over: Callable[[GenerationEnded], None] = lambda over: None
        threading.Thread(target=self._listen, name="rekindle-channel", daemon=True).start()

    @staticmethod
    def from_environment() -> Channel | None:
        """Return the connection that the agent prepared; None: no agent started this process.

        The script has reached its Session, so its start-up code is over.
        """
        earlier_files.end()
        fd = environment.take_channel()
        return None if fd is None else Channel(fd)

    def send(self, message: Message) -> None:
        """Send a message to the agent."""
        self._socket.send(encode(message))

    def is_over(self, generation: int) -> bool:
        """Return whether the coordinator has ended this generation."""
        return self._over >= generation

    def is_over_within(self, generation: int, seconds: float) -> bool:
        """Return whether the coordinator ends this generation within `seconds`."""
        with self._answered:
            return self._answered.wait_for(lambda: self.is_over(generation), seconds)

    def wait_over(self, generation: int) -> None:
        """Wait until the coordinator has ended the generation and `on_over` has returned."""
        while self._settled < generation:
            message = self._next()
            if not isinstance(message, GenerationEnded):
                raise ProtocolError(f"expected the end of generation {generation}, got {message}")

    def is_held(self, generation: int) -> bool:
        """Return whether this generation must pause between two steps."""
        return self._held == generation

    def wait(self, newer_than: int) -> FormGeneration | EndSession | GenerationEnded:
        """Wait for the next generation, for the dismissal, or for an order to send digests."""
        while True:
            message = self._next()
            if isinstance(message, EndSession):
                return message
            if isinstance(message, GenerationEnded) and message.compare is not None:
                return message
            if isinstance(message, FormGeneration) and message.generation > newer_than:
                return message

    def buffers(
        self, serial: int, timeout_s: float | None = None, *, generation: int | None = None
    ) -> tuple[BufferGrant, list[int]] | None:
        """Return the answer to this BufferRequest, with the descriptors; None: it was too late.

        generation: the wait ends with this generation.
        """

        def is_decided() -> bool:
            over = generation is not None and self.is_over(generation)
            return over or serial in self._answers

        with self._answered:
            self._answered.wait_for(is_decided, timeout_s)
            return self._answers.pop(serial, None)

    def forget(self, serial: int) -> None:
        """Discard the answer to this BufferRequest, now or when it arrives."""
        with self._answered:
            if serial in self._answers:
                _close(self._answers.pop(serial)[1])
            else:
                self._unwanted.add(serial)

    def _keep(self, answer: BufferGrant, fds: list[int]) -> None:
        with self._answered:
            if answer.serial in self._unwanted:
                self._unwanted.discard(answer.serial)
                _close(fds)
            else:
                self._answers[answer.serial] = answer, fds
                self._answered.notify_all()

    def _next(self) -> Message:
        message = self._waiting.get()
        if isinstance(message, GenerationEnded):
            self._settled = max(self._settled, message.generation)
        return message

    def _listen(self) -> None:
        try:
            self._read_messages()
        except BaseException:
            # Other ranks would wait without end for a rank that receives no messages.
            say(traceback.format_exc().rstrip(), logging.ERROR)
            os.kill(os.getpid(), signal.SIGKILL)

    def _read_messages(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 8)
            if not data:
                # The agent has ended, and only the agent can give this rank orders.
                os.kill(os.getpid(), signal.SIGKILL)
            message = decode_to_rank(data)
            match message:
                case Inject():
                    self.injected.append(message)
                    say(injection.received(message), logging.INFO)
                case PauseRequest(generation=generation):
                    self._held = generation
                case Settings():
                    self.settings = message
                case BufferGrant():
                    self._keep(message, fds)
                case FormGeneration(settings=settings):
                    self.settings = settings
                    self._waiting.put(message)
                case GenerationEnded(generation=generation):
                    with self._answered:
                        self.over_cause, self.compared = message.cause, message.compare
                        self._over = max(self._over, generation)
                        self._answered.notify_all()
                    self.on_over(message)
                    self._waiting.put(message)
                case _:
                    self._waiting.put(message)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
