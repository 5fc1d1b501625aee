"""An agent of one rank, in the process of the rank, that sends prepared messages."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable

from rekindle import names
from rekindle.protocol import agent as protocol


class Agent:
    """Answer each arrival with the next of `forms`, then with EndSession.

    Record all received messages.

    A failed step ends its generation.
    """

    def __init__(self, forms: Iterable[protocol.FormGeneration]) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.environ[names.ENV_CHANNEL_FD] = str(theirs.detach())
        self._forms = iter(forms)
        self.received: list[protocol.Message] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def over(self, generation: int, finished: int = 0) -> None:
        self._say(protocol.GenerationEnded(generation=generation, finished=finished))

    def _listen(self) -> None:
        while data := self._mine.recv(1 << 17):
            message = protocol.decode_from_rank(data)
            self.received.append(message)
            match message:
                case protocol.Arrived(finished=finished):
                    self._say(next(self._forms, protocol.EndSession(finished=finished or 0)))
                case protocol.StepFailed(generation=generation):
                    self.over(generation)
                case protocol.BufferRequest(serial=serial):
                    self._say(protocol.BufferGrant(error="no memory", serial=serial))

    def _say(self, message: protocol.Message) -> None:
        self._mine.send(protocol.encode(message))
