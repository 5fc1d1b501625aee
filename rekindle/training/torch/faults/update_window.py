"""The update window: from the first change of the state to the step's end, seen by the agent too.

A rank that is caught in it is torn: its state is of no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rekindle.errors import StaleError
from rekindle.protocol.heartbeat_page import Page
from rekindle.training.torch.faults.repairs import Repairs
from rekindle.training.torch.groups.generation_group import Group
from rekindle.training.torch.state.transfer import wire_device


class Updates:
    """Marks the window on the heartbeat page, once the update's gradients are known to be real.

    together: no rank begins its update before all have their gradients. Of a sharded state a step
        is lost where one shard's ranks have done it and another's could not; this way all do it,
        for an update itself asks nothing of others. It costs an all-reduce of one number per step.
        On an NPU too: errors that are told when gradients are waited for cost no step then.
    group: the ranks of the generation that this rank is in.
    """

    def __init__(
        self, page: Page | None, repairs: Repairs, group: Group, *, together: bool
    ) -> None:
        self.group = group
        self._page = page
        self._device = repairs.device
        self._times = repairs.times
        self._together = together

    def watch(self, named: Mapping[str, Any]) -> None:
        """Have every optimizer among these tell when it begins."""
        page = self._page
        if page is None:
            return
        for thing in named.values():
            if isinstance(thing, torch.optim.Optimizer):
                thing.register_step_pre_hook(lambda *_: self._begin(page))

    def _begin(self, page: Page) -> None:
        """The gradients are about to be used: they must be real, not those of a severed group.

        An accelerator's collectives do not hold the host up, and raise nothing when aborted.
        """
        self._device.wait()
        if self.group.severed:
            raise StaleError("the generation ended before the update")
        if self._together and not page.in_update:
            have = torch.ones(1, device=wire_device())
            dist.all_reduce(have)
            if int(have.item()) != dist.get_world_size():
                raise StaleError("the generation ended while the ranks met for the update")
        self._times.begin((page.finished or 0) + 1)
        page.begin_update()
