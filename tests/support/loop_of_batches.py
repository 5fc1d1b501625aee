"""A loop whose variables go from one process to the next, without a Session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from rekindle.training.torch.data.all_gather import pack, unpack
from rekindle.training.torch.data.epoch_position import Place, Stage
from rekindle.training.torch.state.script_variables import Variables

BATCHES = 5


class Loop:
    """The places of one epoch, without a Session.

    first: the batch with which this process begins; it then takes `received`. last: the batch at
    whose request the process ends.
    """

    def __init__(self, received: bytes | None, first: int, last: int, ignore: Any = ()) -> None:
        self.variables = Variables((None,), ignore)  # a Session without a scheduler gives None
        self._first, self._last = first, last
        if received is not None:
            self.variables.load_state_dict(unpack(received))

    def batches(self) -> Iterator[int]:
        """Yield the numbers of the batches."""
        for number in range(self._first, BATCHES + 1):
            place = Place(0, number, Stage.BATCHES.value)
            if self.variables.is_new and self.variables.place is not None:
                self.variables.take(sys._getframe())
            self.variables.look(sys._getframe(), place, outer=False)
            if number == self._last:
                return
            yield number

    def note(self) -> bytes:
        """Return the values at the last place."""
        return pack(self.variables.state_dict(), "variables")


Script = Callable[[Loop], Any]
