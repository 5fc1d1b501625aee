"""The training state that a rank's process has: of which step, and how it comes by another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle.rank.channel import Channel
from rekindle.rank.rank_place import Place
from rekindle.recovery.policy.plan import Made, RankPlan, Source
from rekindle.training.torch.groups.script_groups import ScriptGroups
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.restore import fetch_state
from rekindle.training.torch.state.transfer import send_state


class Standing:
    """Where this process's state stands.

    finished: steps. made: the generation that did the last of them. whole: the state is that of
    `finished` steps. torn: it is of no step; neither is what the script has just built.

    fresh: the module that all ranks have to begin with as rank 0 has built it.
    """

    def __init__(
        self, named: Mapping[str, Any], groups: ScriptGroups, *, fresh: torch.nn.Module | None
    ) -> None:
        self.finished = 0
        self.made = 0
        self.whole = False
        self.torn = False
        self._named = named
        self._groups = groups
        self._fresh = fresh

    @property
    def told(self) -> int | None:
        """Steps finished, as `Arrived` tells them."""
        return self.finished if self.whole or self.torn else None

    def tear(self) -> None:
        """The state was interrupted while it was changed."""
        self.whole, self.torn = False, True

    def step_done(self, generation: int) -> None:
        """The state is that of one more step."""
        self.finished, self.made = self.finished + 1, generation

    def take(self, plan: RankPlan, made: Made, place: Place, channel: Channel) -> None:
        """Bring the state to the planned one.

        Raises CheckpointError or CorruptError: the source has not what the plan expects of it.
        """
        source = plan.source
        if source is not Source.SELF:
            self.whole = False
            self.torn = self.torn or source is not Source.FRESH  # a part may be loaded
            fetch_state(
                plan,
                made,
                place=place,
                named=self._named,
                channel=channel,
                fresh=self._fresh,
            )
            self._groups.loaded(source)
        self.finished, self.made = made
        self.whole, self.torn = True, False

    def send(self, plan: RankPlan) -> None:
        """Send the state to whom the plan names."""
        if plan.sends_to:
            send_state(capture(self._named), plan.sends_to)
