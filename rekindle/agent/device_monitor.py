"""An agent's eye on its devices: which fault codes they have, as their driver says it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from rekindle.agent.devices import tools as device_tools
from rekindle.protocol.agent import Conditions, Message
from rekindle.protocol.monitoring import Condition

LOOK_S = 5.0


class ConditionWatch:
    """Tells the coordinator how devices are. devices: the process on each, 0: it has ended."""

    def __init__(
        self, devices: Callable[[], dict[int, int]], send: Callable[[Message], None]
    ) -> None:
        self._devices, self._send = devices, send
        self._last: dict[int, Condition] = {}
        self._said: set[str] = set()

    async def run(self) -> None:
        """Look again and again, while there may be anything to see."""
        goes_on = device_tools.has_npus()
        while goes_on:
            await asyncio.sleep(LOOK_S)
            try:
                goes_on = await self.look()
            except Exception as error:  # a bug of ours, which costs no more than this look
                self._say(f"fault codes of devices could not be read: {error!r}")

    async def look(self) -> bool:
        """Tell how devices are, where that is news or a fault; False: it can never be known.

        What was read while a process came is not told: its device may just have been healed. Codes
        are told again and again, for to the coordinator they are news once it was.
        """
        asked = self._devices()
        if not asked:
            return True
        found = await device_tools.conditions(asked)
        for problem in (found.absent, *found.problems):
            if problem:
                self._say(f"fault codes of devices are not read: {problem}")
        now = self._devices()
        known = {at: each for at, each in found.devices.items() if now.get(at) == asked[at]}
        if any(each.codes or self._last.get(at) != each for at, each in known.items()):
            self._send(Conditions(devices=known))
        self._last |= known
        return not found.absent

    def _say(self, what: str) -> None:
        """Say it once."""
        if what not in self._said:
            self._said.add(what)
            print(f"rekindle agent: {what}", file=sys.stderr, flush=True)
