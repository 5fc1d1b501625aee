"""The loop over epochs and the batches of any loader, for one rank.

docs/decisions/030-the-loop-that-people-write.md has the rules.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

import msgspec

from rekindle.console import say
from rekindle.errors import SessionError
from rekindle.rank.member import NOWHERE
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.epoch_position import END, Order, Stage, gathered
from rekindle.training.torch.loop import Loop, Step
from rekindle.training.torch.repeat import LocalValues, Repeat
from rekindle.training.torch.state.skeleton import Writer

T = TypeVar("T")


class Block:
    """The work of one batch, with all its collectives: `with session.step() as step:`.

    number: of the step in the whole run, from 0.
    """

    def __init__(self, epochs: Epochs, step: Step) -> None:
        self._epochs = epochs
        self._step = step
        self.number = step.number

    def log(self, **metrics: Any) -> None:
        """Record values of this step, as Step.log() does."""
        self._step.log(**metrics)

    def __enter__(self) -> Block:
        """Begin the block, for the first time or again."""
        self._epochs.begin_block(sys._getframe(1), self._step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """End the block. After a fault, the script continues at the `with` statement."""
        return self._epochs.end_block(self._step, error)


class Epochs:
    """The loop over epochs of one rank.

    A call of the script into it may meet the other ranks again after a fault.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._position = loop.data.epochs
        self._repeat = Repeat()
        kept = (*loop.given.objects(), *loop.generations.named.values(), *loop.given.ignore)
        self._values = LocalValues(kept)
        self._order = Order(loop.generations, loop.data.epochs)
        self._here = -1  # the epoch that this process is in
        self._total = 0  # epochs
        self._stage = Stage.BEFORE
        self._runs = 0  # runs of this process in this stage
        self._is_open = False  # the script has a batch without a finished block
        self._is_due = False  # the newest block has no snapshot yet
        self._is_first = False  # this block is the first at its place in the script
        self._returns = False  # the small state returns to what this process has received
        self._outer: tuple[Any, ...] = ()  # the generators outside of the block
        self._carried = Carried(loop, kept)

    def begin(self) -> None:
        """Take the position that this process has received."""
        if self._loop.member is not None and self._position.is_used:
            self._returns = self._order.received = True
            self._loop.repairs.before.keep()
            if not self._agree():
                self._join()

    def end(self) -> None:
        """Wait until all ranks have come to the end of their loop."""
        finished = self._loop.state.finished
        if self._loop.member is None or not self._position.is_used or not finished:
            return
        self._leave_batches()
        self._reach("end")
        self._return_small_state("start", "run", "end")
        self._keep(last=True)
        self._loop.progress.asked_for(finished)
        while self._join():
            pass  # others have failed at the end, and meet again

    def epochs(self, total: int, frame: FrameType) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of `total`. frame: of the caller."""
        self._loop.given.check_epochs()
        self._position.is_used = True
        self._carried.frames = [frame]
        self._total = total
        position = self._position
        while True:
            self._leave_batches()
            if self._here == position.epoch and self._here < total:
                position.begin_epoch()
            self._here = position.epoch
            self._enter(Stage.OPENING)
            self._reach("start")
            self._meet()
            self._keep()
            self._carry()
            is_over = self._here >= total
            reached = ("start",) if is_over else ("start", "end")  # the end of a former run
            if position.stage == Stage.OPENING and position.point in reached:
                self._return_small_state(*reached)
                self._order.catch_up()
            if is_over:
                self._carried.frames = []
                return
            yield self._here

    def batches(self, loader: Any, frame: FrameType, *, numbered: bool) -> Iterator[Any]:
        """Yield the remaining batches of this epoch. numbered: as pairs with their numbers."""
        position, epoch = self._position, self._here
        if epoch < 0 or self._stage is not Stage.OPENING:
            raise SessionError(
                "session.batches() needs an epoch of its own, `for epoch in session.epochs(N):`; "
                "an epoch has one loop over batches; chain several loaders into one"
            )
        self._carried.frames = list(dict.fromkeys((*self._carried.frames[:1], frame)))
        if position.stage == Stage.CLOSING:
            self._order.skip_all(loader, again=position.point != "start")
            self._return_small_state("start")
            self._enter(Stage.CLOSING)
            self._carry()
            return
        source = self._order.begin(loader)
        position.stage = Stage.BATCHES.value
        self._enter(Stage.BATCHES)
        try:
            while True:
                if self._is_open:
                    raise SessionError(
                        "the script asks for the next batch, but this one had no finished "
                        "`with session.step():` block: do the work of each batch inside of one"
                    )
                self._reach("start")
                self._meet()
                self._keep()
                with self._loop.loading():
                    batch = self._order.take(source)
                if batch is END:
                    return
                if not position.inside:
                    self._return_small_state("start")
                self._carry()
                self._is_open = True
                yield (position.batch, batch) if numbered else batch
        finally:
            source.close()
            if (epoch, self._stage) == (self._here, Stage.BATCHES):
                self._leave_batches()

    def step(self) -> Block:
        """Return the block of the present batch."""
        if not self._is_open:
            found = "has finished its block" if self._stage is Stage.BATCHES else "has no batch"
            text = "Do all work of a batch in one block, in `for batch in session.batches(loader):`"
            raise SessionError(f"session.step(): the script {found}. {text}")
        return Block(self, Step(self._loop, self._loop.state.finished))

    def _enter(self, stage: Stage) -> None:
        self._stage, self._runs = stage, 0

    def _leave_batches(self) -> None:
        """Enter the stage after the batches; the script may have left their loop early."""
        self._is_open = False
        if self._stage is Stage.BATCHES:
            self._position.stage = Stage.CLOSING.value
            self._enter(Stage.CLOSING)
            self._reach("start")
            self._carry()

    def _reach(self, point: str) -> None:
        """Reach a point of the present stage: `start`, `run` or `end`."""
        if not self._returns:
            self._position.point = point

    def begin_block(self, frame: FrameType, step: Step) -> None:
        """Begin a block in this frame."""
        self._return_small_state("start", "run", "end")
        self._is_first = self._repeat.enter(frame)
        self._outer = rng.outer_states()
        self._order.check_draws(self._outer)
        self._carry(inside=True)
        while True:
            self._position.inside = True
            try:
                if self._loop.member is not None:
                    self._loop.repairs.before.keep()
                    self._values.keep(frame)
                self._loop.begin_step(step.number)
                if self._position.batch == 0:
                    self._order.compare()
            except Exception as error:
                if not self._loop.leave_step(error):
                    raise
                self._meet_again(step)
            else:
                return

    def end_block(self, step: Step, error: BaseException | None) -> bool:
        """End a block; True: its error was a fault, and the block begins again."""
        if error is None and self._loop.member is not None:
            self._values.check()
        if step.close(error):
            self._meet_again(step)
            self._repeat.again(self._values.restore)
            return error is not None
        rng.set_outer(self._outer)
        if error is None:
            self._position.block_done()
            self._is_open, self._is_due, self._runs = False, True, 0
            finished = self._loop.state.finished
            self._loop.progress.page.total = finished + self._order.left(self._total)
            if self._is_first and self._loop.member is not None:
                self._repeat.check()
        self._values.leave()
        return False

    def _meet_again(self, step: Step) -> None:
        """Form the next generation after a broken block."""
        rng.set_outer(self._outer)
        self._join()
        if self._loop.state.finished != step.number:
            raise SessionError(
                f"this rank is in step {step.number}, but training continues after step "
                f"{self._loop.state.finished}"
            )

    def run(
        self, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> T:
        """Return the result of a function, which all ranks run again after a fault."""
        loop, position, stage = self._loop, self._position, self._stage
        if self._is_open:
            raise SessionError("session.run() belongs after the block of a batch, not before it")
        if loop.member is None:
            return function(*args, **kwargs)
        position.is_used = True
        self._reach("run")
        if stage is Stage.CLOSING:
            self._keep()
        self._meet(in_run=True)
        done = position.results[stage]
        if self._runs < len(done):  # the other ranks have run it
            self._runs += 1
            found: T = done[self._runs - 1]
            return found
        self._return_small_state("run")
        self._order.catch_up()
        while True:
            place, model = position.key, loop.generations.model
            outer = rng.outer_states()
            try:
                result = self._run_once(function, args, kwargs)
            except Exception as error:
                rng.set_outer(outer)
                if not loop.leave_step(error):
                    raise
                result, has_result = (position.pending or [None])[0], bool(position.pending)
                self._join(in_run=True)
                if has_result and position.key > place:  # a rank has left the run
                    self._order.leave_run(outer)
                    break
                args, kwargs = _replaced(args, kwargs, model, loop.generations.model)
            else:
                position.results[stage].append(position.pending.pop())
                break
        self._runs = len(position.results[stage])
        return result

    def _run_once(
        self, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> T:
        loop = self._loop
        outer = rng.outer_states()
        loop.repairs.before.keep()
        with loop.running():
            result = function(*args, **kwargs)
            if loop.progress.page.in_update:
                raise SessionError(
                    "session.run(): the function updates parameters; do that in a block"
                )
            try:
                Writer().encode(result, "the result")
            except SessionError as error:
                raise SessionError(
                    f"session.run(): {error}. A new process gets the result of the other ranks: "
                    "return numbers, texts or tensors, or nothing"
                ) from error
            self._position.pending = [result]
            self._order.wait_for_all(outer)
        return result

    def _meet(self, *, in_run: bool = False) -> None:
        """Between two blocks: form the next generation if this one has ended, or must end."""
        member = self._loop.member
        if member is None:
            return
        if member.is_over or member.session_ended:
            self._join(in_run=in_run)
        elif not (in_run and self._stage is Stage.BATCHES) and member.hold():
            self._loop.repairs.device.free()
            self._join()

    def _join(self, *, in_run: bool = False) -> bool:
        """Form generations until all ranks agree about their places; False: all have ended."""
        loop, member = self._loop, self._loop.member
        assert member is not None
        if in_run and self._stage is Stage.BATCHES:
            # A new process begins at a batch, and would not call this run.
            loop.state.tear()
            member.stands = NOWHERE
        else:
            member.stands = loop.state.finished
        while True:
            if self._returns:
                self._restore_received()
            else:
                self._note()
            if not member.join():
                return False
            if self._returns:
                loop.repairs.before.keep()
            if self._agree():
                return True

    def _agree(self) -> bool:
        """Exchange the places of all ranks; False: the generation has ended.

        If a rank has left a run, it counts as finished on all ranks.
        """
        position = self._position
        mine = position.key
        try:
            newest = max(gathered(mine))
        except Exception as error:
            if not self._loop.leave_step(error, inside=False):
                raise
            return False
        if newest > mine:
            position.results[position.stage].extend(position.pending)
        position.pending = []
        return True

    def _carry(self, *, inside: bool = False) -> None:
        """Keep, or take back, the variables of the script around the blocks."""
        if self._loop.member is not None:
            self._carried.at((self._loop.state.finished, *self._position.key[:3], inside))

    def _return_small_state(self, *points: str) -> None:
        """Undo the script's changes of the state that it received at one of these points."""
        if self._returns and self._position.point in points:
            self._restore_received()
            self._returns = False

    def _restore_received(self) -> None:
        if not self._loop.repairs.before.restore():
            raise SessionError(
                "before its first block in this process, the script has changed parameters or "
                "large tensors of the state that it has received; do that before the Session"
            )

    def _note(self) -> None:
        self._order.note(everything=self._stage is not Stage.BATCHES)

    def _keep(self, *, last: bool = False) -> None:
        """Take a snapshot of the newest block, if one is due."""
        if self._is_due or last:
            self._is_due = False
            self._position.prepare = self._note
            self._loop.keep(last=last)
            self._position.prepare = None


class Carried:
    """Plain variables of the script's loops, on the heartbeat page, for the rank's next process.

    frames: those of the loops.
    """

    def __init__(self, loop: Loop, kept: tuple[Any, ...]) -> None:
        self.frames: list[FrameType] = []
        self._page = loop.progress.page
        self._position = loop.data.epochs
        self._slot = loop.generations.slot
        self._values = [LocalValues(kept), LocalValues(kept)]
        self._notes: dict[tuple[int | bool, ...], list[dict[str, Any]]] = {}
        for note in self._page.notes():
            place, values = msgspec.msgpack.decode(note)
            self._notes[tuple(place)] = values
        self._is_new = True  # this process has begun no block

    def at(self, place: tuple[int | bool, ...]) -> None:
        """Take the variables back that the former process had at this place, or keep those of now.

        place: the finished steps, the position, and whether a block begins.
        """
        found = self._notes.get(place, []) if self._is_new else []
        for frame, values, own in zip(self.frames, self._values, found, strict=False):
            values.fill(frame, own)
        if found:
            self._position.carried = []
        moving = [v.moving(frame) for frame, v in zip(self.frames, self._values, strict=False)]
        if self._is_new and place[-1]:
            self._is_new = False
            if self._position.carried:
                names = ", ".join(self._position.carried)
                say(
                    f"rank {self._slot}: the values of {names} are lost with the former process, "
                    "and begin again; what must not be lost belongs into extra={...}"
                )
        self._position.carried = sorted({*self._position.carried}.union(*moving))
        for values in self._values:
            values.leave()
        with contextlib.suppress(OverflowError, UnicodeEncodeError):  # then they are lost
            self._page.put_note(msgspec.msgpack.encode((place, moving)))


def _replaced(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], old: Any, new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the wrapper of the new generation."""
    return (
        tuple(new if each is old else each for each in args),
        {name: new if each is old else each for name, each in kwargs.items()},
    )
