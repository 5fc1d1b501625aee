"""An agent's part in light profiling: old records go, and MindCluster's switch is looked at.

MindCluster mounts a job's ConfigMap `data-trace-...` as a folder of its pods, and changes the file
in it; what it says there holds for the whole job, whichever agent sees it first.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rekindle.profiling.files import LOOK_S, age
from rekindle.profiling.markers import UNREADABLE
from rekindle.profiling.switch import Switch, read_switch, switch_of
from rekindle.runtime.protocol import Message, Traced

SWITCH = Path("/user/cluster-info/datatrace-config/profilingSwitch")
_TICK_S = 1.0


class RecordCare:
    """What an agent does about records. folder: of all; own: ranks whose records are ours.

    read: returns what the coordinator is to be told of them; in a thread.
    """

    def __init__(
        self,
        folder: Path,
        own: Callable[[], Iterable[int]],
        send: Callable[[Message], None],
        read: Callable[[], Message | None],
        switch: Path = SWITCH,
    ) -> None:
        self._folder, self._own, self._send, self._file = folder, own, send, switch
        self._read = read
        self._said = Switch()
        self._refused = ""

    async def run(self) -> None:
        """Look again and again."""
        due = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            # Nobody may lose a job's records, or its switch, for a file that somebody has spoilt.
            try:
                self.look()
                news = await asyncio.to_thread(self._read)
                if news is not None:
                    self._send(news)
                if time.monotonic() >= due:
                    due = time.monotonic() + LOOK_S
                    await asyncio.to_thread(age, self._folder, tuple(self._own()))
            except (OSError, ValueError) as error:
                self._refuse(f"records cannot be looked at: {error}")

    def look(self) -> None:
        """Tell the coordinator what the switch says, if that is new; without one nothing."""
        try:
            text = self._file.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._refuse(f"{self._file}: {error}")
            return
        try:
            said = switch_of(read_switch(msgspec.json.decode(text, type=dict[str, str])).words)
        except UNREADABLE as error:
            self._refuse(f"{self._file} is not understood, and stays without effect: {error}")
            return
        if said != self._said:
            self._said = said
            self._send(Traced(switch=said))

    def _refuse(self, why: str) -> None:
        if why != self._refused:
            self._refused = why
            print(f"rekindle agent: {why}", file=sys.stderr, flush=True)
