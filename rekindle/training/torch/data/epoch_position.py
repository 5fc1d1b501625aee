"""The place of a rank in the loop over epochs, as a part of the state, and the order that follows.

A new process receives the place, and continues with the same batch and the same random numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.epoch_batches import Epoch, EpochBatches
from rekindle.training.torch.data.epoch_order import EpochOrder, digest
from rekindle.training.torch.state.transfer import wire_device

_WATCHED = 8  # batches of an epoch in which draws between blocks are searched


class Stage(str, enum.Enum):
    """The part of an epoch that the script is in. Each has its own list of results."""

    BEFORE = "before"  # the script has begun no epoch
    OPENING = "opening"  # of an epoch, before its first batch
    BATCHES = "batches"
    CLOSING = "closing"  # after the last batch


class EpochPosition:
    """The place in the loop over epochs. It is a part of the state.

    - `epoch`: the present one; -1: none has begun. `batch`: its finished batches.
    - `before`: the batches of the epoch before it.
    - `inside`: a block has begun, and is not finished.
    - `results`: of the runs in each stage.
    - `pending`: the result of a run that this rank has finished, but maybe not all ranks.
    - `start`: the states of all that decides the order of the epoch, at its begin. None: no block
      of this epoch has begun.
    - `starts`: the same of each rank, if they differ.
    - `alike`: whether the ranks' generators were equal. None: not known yet.
    - `outer`: the states of the generators outside of blocks, and the counters of samplers.
    - `of`: world size and batch size; the order depends on them.
    """

    optional = True  # older states lack it

    def __init__(self) -> None:
        self.epoch, self.batch, self.before = -1, 0, 0
        self.stage = Stage.BEFORE.value
        self.inside = False
        self.results: dict[str, list[Any]] = {each.value: [] for each in Stage}
        self.pending: list[Any] = []
        self.start: dict[str, Any] | None = None
        self.starts: dict[int, Any] = {}
        self.alike: bool | None = None
        self.outer: dict[str, Any] = {}
        self.of: dict[str, Any] = {}

    @property
    def is_used(self) -> bool:
        """Whether the script has this loop."""
        return self.epoch >= 0 or bool(self.results[Stage.BEFORE] or self.pending)

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The place as numbers; a later place is greater."""
        stage = list(Stage).index(Stage(self.stage))
        return self.epoch, self.batch, stage, len(self.results[self.stage])

    def begin_epoch(self) -> None:
        """Move to the next epoch."""
        self.epoch += 1
        self.before, self.batch, self.start = self.batch, 0, None
        for stage in (Stage.OPENING, Stage.BATCHES, Stage.CLOSING):
            self.results[stage] = []
        self.stage = Stage.OPENING.value

    def block_done(self) -> None:
        """Record that the block of a batch is finished."""
        self.batch += 1
        self.inside = False
        self.results[Stage.BATCHES] = []

    def for_manifest(self) -> dict[str, Any]:
        """Return the position as a checkpoint's manifest shows it."""
        return {"epoch": self.epoch, "batch": self.batch} if self.epoch >= 0 else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position; empty: the script has another loop."""
        return dict(vars(self)) if self.is_used else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take another position."""
        vars(self).update(state or vars(EpochPosition()))


class World(Protocol):
    """The present world, and this rank's number in the full one."""

    world_size: int
    full_world: int
    slot: int


class Order:
    """The order of the batches, and the generators outside of blocks, in a new process too.

    received: this process has received a position, and has not yet taken its generators.
    """

    def __init__(self, generations: World, position: EpochPosition) -> None:
        self._place = generations
        self._position = position
        self._loaders: dict[int, EpochBatches] = {}
        self._globals = EpochOrder({})
        self._batches: EpochBatches | None = None
        self._start: dict[str, Any] = {}
        self._length = 0
        self._drawn: tuple[Any, ...] = ()
        self.received = False

    def begin(self, loader: Any) -> Epoch:
        """Begin or continue the epoch at the position."""
        batches, position = self._use(loader), self._position
        start = position.starts.get(self._place.slot, position.start)
        if position.start is None:
            if self.received:
                self._take_outer(batches)
            source = batches.begin()
        else:
            if position.batch and batches.reads is not None:
                say(f"{position.batch} batches are read and dropped, because {batches.reads}")
            source = batches.begin(position.batch, start)
            if self.received and position.alike:
                batches.restore({"generators": position.outer["generators"]})
        self.received = False
        self._start, self._drawn = source.start, rng.outer_states()
        return source

    def skip_all(self, loader: Any) -> None:
        """Take the generators after the last batch of the epoch."""
        batches, position = self._use(loader), self._position
        if self.received and position.alike:
            self._take_outer(batches)
        elif self.received:
            start = position.starts.get(self._place.slot, position.start)
            batches.begin(position.batch, start).close()
        self.received = False

    def catch_up(self) -> None:
        """Before a run: take the generators of the process that this process has received."""
        if self.received and self._position.alike:
            found = self._position.outer["generators"]
            live = self._globals.now().keys()
            self._globals.restore({n: each for n, each in found.items() if n in live}, None)

    def note(self, *, everything: bool) -> None:
        """Write the present states into the position. everything: also what the samplers count."""
        if self._batches is None:
            self._position.outer = {"generators": self._globals.now()}
        else:
            self._position.outer = self._batches.states() if everything else self._batches.now()

    def compare(self) -> None:
        """Exchange the states at the begin of the epoch, inside of its first block."""
        position = self._position
        position.start, position.starts = self._start, {}
        position.alike = self._are_alike(self._start)
        if not position.alike:
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, (self._place.slot, self._start))
            position.starts = dict(found)

    def wait_for_all(self, outer: tuple[Any, ...]) -> None:
        """Wait until all ranks have finished a run. outer: the generators before it.

        If the ranks' generators differ, those of this rank continue as if the run had not drawn: a
        new process does not repeat the run.
        """
        position = self._position
        after = rng.outer_states()
        rng.set_outer(outer)
        if position.alike is None:
            position.alike = self._are_alike(self._globals.now())
        else:
            gathered((0,))
        if position.alike:
            rng.set_outer(after)

    def check_draws(self, now: tuple[Any, ...]) -> None:
        """Check, in the first blocks, that the script draws nothing outside of blocks.

        That is only wrong if the ranks' generators differ: a new process could not know the states.
        Raises SessionError: it does.
        """
        if self._position.alike is False and self._position.batch < _WATCHED and self._drawn:
            if not all(map(rng.is_same, self._drawn, now)):
                raise SessionError(
                    "the script draws random numbers between two blocks, and the ranks have "
                    "different seeds, so a new process could not draw the same numbers: draw "
                    "inside of the block, or give all ranks the same seed"
                )

    def left(self, epochs: int) -> int:
        """Return the batches that remain, as far as the loader knows. epochs: of the entire run."""
        position = self._position
        left = self._length * (epochs - position.epoch) - position.batch
        return max(0, left)

    def _use(self, loader: Any) -> EpochBatches:
        """Return the batches of this loader. Raises SessionError: it does not fit the position."""
        place, position = self._place, self._position
        if place.world_size != place.full_world:
            raise SessionError(
                "session.batches(): the order of a loader belongs to one world size, so nodes "
                f"cannot leave; this world has {place.world_size} of {place.full_world} ranks. "
                "Give one number of nodes, or use Session(sampler=StepSampler(...))"
            )
        of = {"ranks": place.full_world, "batch_size": getattr(loader, "batch_size", None)}
        if position.start is not None and position.of and position.of != of:
            changed = ", ".join(
                f"{n} {position.of[n]} became {of[n]}" for n in of if of[n] != position.of[n]
            )
            raise SessionError(
                f"{changed}, and the state is from the middle of epoch {position.epoch}: finish "
                "the epoch with the former values"
            )
        position.of = of
        if id(loader) not in self._loaders:
            self._loaders[id(loader)] = EpochBatches(loader)
        self._batches = self._loaders[id(loader)]
        self._length = len(loader) if hasattr(loader, "__len__") else 0
        return self._batches

    def _take_outer(self, batches: EpochBatches) -> None:
        """Take the states outside of blocks, before the epoch begins."""
        position = self._position
        mine = batches.states()["values"]
        if position.alike:
            # The script has told its sampler the number of this epoch already.
            for name, each in position.outer.get("values", {}).items():
                own = mine.setdefault(name, {})
                own.update({k: v for k, v in each.items() if k != "epoch"})
            batches.restore({"generators": position.outer["generators"], "values": mine})
        elif position.starts:  # the epoch before this one leads to its own states
            batches.begin(position.before, position.starts[self._place.slot]).close()
            batches.restore({"generators": batches.now()["generators"], "values": mine})

    def _are_alike(self, states: Mapping[str, Any]) -> bool:
        value = digest(states)
        found = gathered((value >> 32, value & 0xFFFFFFFF))
        return len(set(found)) == 1


def gathered(mine: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the numbers of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    own = torch.tensor(mine, dtype=torch.int64, device=wire_device())
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [tuple(each.tolist()) for each in found]
