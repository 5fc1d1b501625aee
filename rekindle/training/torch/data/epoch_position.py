"""The place of a rank in the loop over epochs, as a part of the state, and the order that follows.

A new process receives the place, and continues with the same batch and the same random numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.epoch_batches import Epoch, EpochBatches
from rekindle.training.torch.data.epoch_order import EpochOrder, digest
from rekindle.training.torch.state.transfer import wire_device

END = object()  # instead of a batch after the last one
_WATCHED = 8  # batches of an epoch in which draws between blocks are searched


class Stage(str, enum.Enum):
    """The part of an epoch that the script is in. Each has its own list of results."""

    BEFORE = "before"  # the script has begun no epoch
    OPENING = "opening"  # of an epoch, before its first batch
    BATCHES = "batches"
    CLOSING = "closing"  # after the last batch


class Place(NamedTuple):
    """A place in the loop at which the script calls the Session.

    epoch, batch: the present ones. stage: a value of Stage.
    """

    epoch: int
    batch: int
    stage: str

    def is_at(self, other: Place) -> bool:
        """Return whether variables that belong to the other place have the same values here.

        The script runs no code between its last request for a batch and the end of the batches.
        """
        ended = self.stage == Stage.CLOSING and other == self._replace(stage=Stage.BATCHES.value)
        return other == self or ended


class EpochPosition:
    """The place in the loop over epochs. It is a part of the state.

    - `prepare`: is called before a snapshot reads the position, to note the generators. It is no
      part of the state.
    - `is_used`: the script has this loop.
    - `epoch`: the present one; -1: none has begun. `batch`: its finished batches.
    - `before`: the batches of the epoch before it.
    - `point`: where the script is in its stage: at the `start`, at a `run`, or at the `end` of the
      Session. `inside`: a block has begun, and is not finished.
    - `results`: of the runs in each stage.
    - `pending`: the result of a run that this rank has finished, but maybe not all ranks.
    - `start`: the states of all that decides the order of the epoch, at its begin. None: it has
      not begun.
    - `starts`: the same of each rank, if they differ. `is_exchanged`: they are of this epoch;
      otherwise they are of the epoch before it.
    - `alike`: the names of the generators that are equal on all ranks. None: not known yet.
    - `outer`: the states of the generators outside of blocks, and the counters of samplers.
    - `of`: world size and batch size; the order depends on them.
    - `varies`: variables that the script reads later change from block to block, on this rank.
      `vary`: the same at the first block of the epoch, on any rank.
    - `variables`: their values, if each rank keeps all of its state in its own snapshots.
    """

    optional = True  # older states lack it

    def __init__(self) -> None:
        self.prepare: Callable[[], None] | None = None
        self.is_used = False
        self.epoch, self.batch, self.before = -1, 0, 0
        self.stage = Stage.BEFORE.value
        self.inside = False
        self.point = "start"
        self.results: dict[str, list[Any]] = {each.value: [] for each in Stage}
        self.pending: list[Any] = []
        self.start: dict[str, Any] | None = None
        self.starts: dict[int, Any] = {}
        self.is_exchanged = False
        self.alike: list[str] | None = None
        self.outer: dict[str, Any] = {}
        self.of: dict[str, Any] = {}
        self.varies = self.vary = False
        self.variables: dict[str, Any] = {}

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The place as numbers; a later place is greater."""
        stage = list(Stage).index(Stage(self.stage))
        return self.epoch, self.batch, stage, len(self.results[self.stage])

    def leads_to(self, place: Place | None) -> bool:
        """Return whether a new process that begins here comes to a place at which variables were.

        place: None: they were at none.
        """
        if place is None:
            return not (self.varies or self.vary)
        opening, first = (
            Place(self.epoch, 0, each.value) for each in (Stage.OPENING, Stage.BATCHES)
        )
        here = Place(self.epoch, self.batch, self.stage)
        if here in (opening, first):
            return place in (opening, first)
        return here.is_at(place)

    def has_just_left(self, place: Place | None) -> bool:
        """Return whether this is the begin of an epoch, and the place the end of the one before."""
        return self.batch == 0 and place == Place(self.epoch - 1, self.before, Stage.CLOSING.value)

    def begin_epoch(self) -> None:
        """Move to the next epoch."""
        self.epoch += 1
        self.before, self.batch = self.batch, 0
        self.start, self.is_exchanged = None, False
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
        if self.prepare is not None:
            self.prepare()
        found = {name: each for name, each in vars(self).items() if name != "prepare"}
        return found if self.is_used else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take another position."""
        vars(self).update(state or vars(EpochPosition()))


class World(Protocol):
    """The number of ranks, and the number of this one."""

    full_world: int
    slot: int


class Order:
    """The order of the batches, and the generators outside of blocks, in a new process too.

    The script's code and its samplers draw from the same generators in turn, and a block has
    generators of its own. These states exist:

    - `position.start` (`starts`, if ranks differ): at the begin of an epoch. A new process takes
      it, and draws the order of the epoch again.
    - `position.outer`: at each place at which a peer can copy the position. A new process takes it
      after that, for the generators that are equal on all ranks (`position.alike`).
    - `_at_batch`: when the script got its batch. It is the `outer` of a rank inside of a block,
      because a new process runs the code between batch and block again.
    - `_after_first`: the received `outer`. It waits for the first batch, with which a sampler draws
      its order.
    - `_after_run`: after a run of this rank, until all ranks have finished it.
    - `_at_first_block`: at the first block of an epoch. Later ones show draws between blocks.

    received: this process has received a position, and has not yet taken its generators.
    """

    def __init__(self, generations: World, position: EpochPosition) -> None:
        self._place = generations
        self._position = position
        self._loaders: dict[int, EpochBatches] = {}
        self._globals = EpochOrder({})
        self._batches: EpochBatches | None = None
        self._at_batch: tuple[Any, ...] = ()
        self._after_run: tuple[Any, ...] = ()  # a run
        self._after_first: dict[str, Any] | None = None  # the generators after the first batch
        self._length = 0
        self._at_first_block: tuple[Any, ...] | None = None
        self._took_global = False  # catch_up() has taken the generators of the process
        self.received = False

    def begin(self, loader: Any) -> Epoch:
        """Begin or continue the epoch at the position."""
        batches, position = self._use(loader), self._position
        if position.batch and batches.reads is not None:
            say(f"{position.batch} batches are read and dropped, because {batches.reads}")
        own: dict[str, Any] | None = None
        if position.is_exchanged:
            own = position.starts.get(self._place.slot, position.start)
        elif self.received:
            self._take_outer(batches)
            own = batches.states() | {"epochs": position.outer.get("epochs", 0)}
            if position.start is not None:
                own["epochs"] = position.start["epochs"]
                own["generators"] |= self._alike_ones(position.start["generators"])
        source = batches.begin(position.batch, own)
        if self.received and (position.inside or position.batch):
            self._after_first = {"generators": self._alike_ones(position.outer["generators"])}
        self.received = False
        if not position.is_exchanged:
            position.start = source.start
        self._at_first_block = None
        return source

    def take(self, source: Epoch) -> Any:
        """Return the next batch, or END."""
        batch = next(source, END)
        if self._after_first is not None and self._batches is not None:
            self._batches.restore(
                self._after_first
            )  # a sampler draws its order with its first batch
            self._after_first = None
        self._at_batch = rng.outer_states()
        return batch

    def skip_all(self, loader: Any, *, again: bool) -> None:
        """Take the generators after the last batch of the epoch. again: catch_up() follows."""
        batches, position = self._use(loader), self._position
        if self.received:
            start = position.starts.get(self._place.slot, position.start)
            batches.begin(position.batch, start).close()
            values = position.outer.get("values", {})
            found = batches.now()["generators"] | self._alike_ones(position.outer["generators"])
            batches.restore({"generators": found, "values": values})
        self.received = self.received and again

    def catch_up(self) -> None:
        """Before a run: take the generators of the process that this process has received."""
        if self.received:
            found = self._alike_ones(self._position.outer["generators"])
            taken = {name: state for name, state in found.items() if name in rng.GLOBAL}
            self._globals.restore({"generators": taken})
            self._took_global = True
            self.received = self._position.stage == Stage.OPENING

    def note(self, *, everything: bool) -> None:
        """Write the present states into the position. everything: also what the samplers count.

        Inside of a block they are those with which the script got its batch: a new process runs the
        code between batch and block again.
        """
        now = rng.outer_states()
        if self._position.inside:
            rng.set_outer(self._at_batch)
        if self._batches is None:
            self._position.outer = self._globals.generator_states()
        else:
            self._position.outer = self._batches.states() if everything else self._batches.now()
        rng.set_outer(now)

    def compare(self) -> None:
        """Exchange the states at the begin of the epoch, inside of its first block."""
        position, start = self._position, self._position.start
        assert start is not None
        alike, starts = self._find_alike(start), {}
        if len(alike) < len(start["generators"]) + 1:
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, (self._place.slot, start))
            starts = dict(found)
        position.alike, position.starts, position.is_exchanged = alike, starts, True
        position.vary = any(varies for [varies] in gathered((int(position.varies),)))

    def wait_for_all(self, outer: tuple[Any, ...]) -> None:
        """Wait until all ranks have finished a run. outer: the generators before it.

        A generator that differs between the ranks continues as if the run had not drawn from it: a
        new process does not repeat the run.
        """
        position = self._position
        self._after_run = rng.outer_states()
        rng.set_outer(outer)
        alike = self._find_alike({**self._globals.generator_states(), "values": {}})
        if position.alike is None:  # on some ranks, if a fault has interrupted this exchange
            position.alike = alike
        self.leave_run(outer)

    def leave_run(self, outer: tuple[Any, ...]) -> None:
        """Set the generators after a run that all ranks have finished."""
        same = [name in (self._position.alike or ()) for name in rng.GLOBAL]
        pairs = zip(same, self._after_run, outer, strict=True)
        rng.set_outer(tuple(new if alike else old for alike, new, old in pairs))

    def check_draws(self, now: tuple[Any, ...]) -> None:
        """Check, in the first blocks, that the script draws nothing outside of blocks.

        That is wrong for a generator that differs between the ranks: a new process could not know
        its state. Raises SessionError: it does.
        """
        if self._at_first_block is None:  # the sampler has drawn its order
            self._at_first_block = now
        if self._position.alike is None or self._position.batch >= _WATCHED:
            return
        for name, before, state in zip(rng.GLOBAL, self._at_first_block, now, strict=True):
            if name not in self._position.alike and not rng.is_same(before, state):
                raise SessionError(
                    f"between two blocks the script draws from the generator of {name}, which has "
                    "another seed on each rank, so a new process could not draw the same numbers: "
                    "draw inside of the block, or give it the same seed on all ranks"
                )

    def left(self, epochs: int) -> int:
        """Return the batches that remain, as far as the loader knows. epochs: of the entire run."""
        position = self._position
        left = self._length * (epochs - position.epoch) - position.batch
        return max(0, left)

    def _use(self, loader: Any) -> EpochBatches:
        """Return the batches of this loader. Raises SessionError: it does not fit the position."""
        place, position = self._place, self._position
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
        values = batches.states()["values"]
        if position.alike is not None and position.starts:
            # The epoch before this one leads to the generators that differ between the ranks.
            mine = rng.outer_states()
            batches.begin(position.before, position.starts[self._place.slot]).close()
            if self._took_global:
                rng.set_outer(mine)
        for name, noted in position.outer.get("values", {}).items():
            # The script has told its sampler the number of this epoch already.
            own = values.setdefault(name, {})
            own.update({key: value for key, value in noted.items() if key != "epoch"})
        taken = rng.GLOBAL if self._took_global else ()
        alike = self._alike_ones(position.outer["generators"])
        found = {n: state for n, state in alike.items() if n not in taken}
        batches.restore({"generators": batches.now()["generators"] | found, "values": values})

    def _alike_ones(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of the generators that are equal on all ranks."""
        return {n: state for n, state in states.items() if n in (self._position.alike or ())}

    def _find_alike(self, states: Mapping[str, Any]) -> list[str]:
        """Return the names of the generators that are equal on all ranks, and `values`."""
        parts = {**states["generators"], "values": states["values"]}
        names = sorted(parts)
        mine = [digest(parts[name]) for name in names]
        found = gathered(tuple(each - (1 << 64 if each >> 63 else 0) for each in mine))
        return [name for name, *each in zip(names, *found, strict=True) if len({*each}) == 1]


def gathered(mine: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the numbers of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    own = torch.tensor(mine, dtype=torch.int64, device=wire_device())
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [tuple(each.tolist()) for each in found]
