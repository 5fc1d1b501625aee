"""The agent's part in light profiling: it removes old records and reads MindCluster's switch.

MindCluster mounts a job's ConfigMap `data-trace-...` as a folder of its pods, and changes the file
in it. The switch in this file holds for the whole job.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from rekindle.agent.threads import in_thread
from rekindle.profiling.files import LOOK_S, age
from rekindle.profiling.limits import Limits
from rekindle.profiling.markers import UNREADABLE
from rekindle.profiling.switch import Switch, read_switch, switch_of
from rekindle.protocol.agent import Message, Traced

SWITCH = Path("/user/cluster-info/datatrace-config/profilingSwitch")
_TICK_S = 1.0


class RecordCare:
    """Looks after the records of an agent's ranks.

    folder: has the records of all ranks. own: returns the agent's ranks. read: returns messages
    about their records for the coordinator; it runs in a thread. cap_bytes: the limit for all
    records.
    """

    def __init__(
        self,
        folder: Path,
        own: Callable[[], Iterable[int]],
        send: Callable[[Message], None],
        read: Callable[[], Message | None],
        switch: Path = SWITCH,
        cap_bytes: int = Limits().cap_bytes,
    ) -> None:
        self._folder, self._own, self._send, self._file = folder, own, send, switch
        self._read, self._cap_bytes = read, cap_bytes
        self._said: Switch | None = None
        self._refused: dict[str, str] = {}  # what was said last, of each thing that is cared for

    async def run(self) -> None:
        """Look again and again."""
        due = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            with self._outliving("the switch cannot be looked at"):
                self.look()
            with self._outliving("records cannot be read"):
                news = await in_thread(self._read)
                if news is not None:
                    self._send(news)
            if time.monotonic() >= due:
                due = time.monotonic() + LOOK_S
                with self._outliving("records cannot be looked through for old ones"):
                    await in_thread(age, self._folder, tuple(self._own()), self._cap_bytes)

    def look(self) -> None:
        """Send the position of the switch to the coordinator, at the start and after a change.

        Without a switch the agent sends nothing.
        """
        try:
            text = self._file.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._refuse("switch", f"{self._file}: {error}")
            return
        try:
            said = switch_of(read_switch(msgspec.json.decode(text, type=dict[str, str])).words)
        except UNREADABLE as error:
            why = f"{self._file} is not understood, and stays without effect: {error}"
            self._refuse("switch", why)
            return
        if said != self._said:
            self._said = said
            self._send(Traced(switch=said))

    @contextlib.contextmanager
    def _outliving(self, what: str) -> Iterator[None]:
        """Report an error once, and continue.

        A damaged file must not end the care of records or the switch. A bug in Rekindle must not,
        either; the agent prints its stack.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            self._refuse(what, f"{what}: {error}")
        except Exception as error:
            stack = "\n" + "".join(traceback.format_exception(error))
            self._refuse(what, f"{what}, which is a bug of Rekindle: {error!r}", stack)

    def _refuse(self, what: str, why: str, more: str = "") -> None:
        if why != self._refused.get(what):
            self._refused[what] = why
            print(f"rekindle agent: {why}{more}", file=sys.stderr, flush=True)
