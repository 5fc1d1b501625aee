"""The loop over epochs and the batches of any loader, for one rank.

docs/decisions/030-the-loop-that-people-write.md has the rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

from rekindle.errors import SessionError
from rekindle.rank.member import NOWHERE
from rekindle.states import StateId
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.epoch_position import END, Order, Place, Stage, gathered
from rekindle.training.torch.loop import Loop, Step
from rekindle.training.torch.repeat import Repeat
from rekindle.training.torch.state.script_values import Blocks
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
        kept = (*loop.given.objects(), *loop.generations.everything.values())
        self._blocks = Blocks(kept, loop.given.ignore)
        self._run_values = Blocks(kept, loop.given.ignore)
        self._variables = loop.generations.variables
        self._has_copy = True  # of variables; it may be that of a former process
        self._order = Order(loop.generations, loop.data.epochs)
        self._here = -1  # the epoch that this process is in
        self._total = 0  # epochs
        self._stage = Stage.BEFORE
        self._runs = 0  # runs of this process in this stage
        self._is_open = False  # the script has a batch without a finished block
        self._is_due = False  # the newest block has no snapshot yet
        self._is_alone = False  # other ranks may have passed the place after the newest block
        self._device_draws: Any = None  # the state of the device's generator after a block
        self._is_first = False  # this block is the first at its place in the script
        self._returns = False  # the small state returns to what this process has received
        self._outer: tuple[Any, ...] = ()  # the generators outside of the block

    def begin(self) -> None:
        """Take the position that this process has received."""
        if self._loop.member is not None and self._position.is_used:
            if self._position.variables:
                self._variables.load_state_dict(self._position.variables)
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
        meets: bool | None = True
        while (
            meets
        ):  # again if others have failed at the end: a new rank needs all for its snapshot
            meets = self._keep(last=True)
            if meets is None:
                self._loop.progress.asked_for(finished)
                meets = self._join()

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of `total`."""
        own = self._loop.generations.own
        self._loop.given.check_epochs(alone=own is not None and own.of_steps)
        self._position.is_used = True
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
            self._look(sys._getframe(), outer=True)
            self._keep()
            is_over = self._here >= total
            reached = ("start",) if is_over else ("start", "end")  # the end of a former run
            if position.stage == Stage.OPENING and position.point in reached:
                self._return_small_state(*reached)
                self._order.catch_up()
            if is_over:
                return
            yield self._here

    def batches(self, loader: Any, *, numbered: bool) -> Iterator[Any]:
        """Yield the remaining batches of this epoch. numbered: as pairs with their numbers."""
        position, epoch = self._position, self._here
        if epoch < 0 or self._stage is not Stage.OPENING:
            raise SessionError(
                "session.batches() needs an epoch of its own, `for epoch in session.epochs(N):`; "
                "an epoch has one loop over batches; chain several loaders into one"
            )
        if position.stage == Stage.CLOSING:
            self._order.skip_all(loader, again=position.point != "start")
            self._return_small_state("start")
            self._enter(Stage.CLOSING)
            self._look(sys._getframe())
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
                self._look(sys._getframe())
                self._keep()
                with self._loop.loading():
                    batch = self._order.take(source)
                if batch is END:
                    return
                if not position.inside:
                    self._return_small_state("start")
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
            self._look(sys._getframe())

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
        self._check_device_draws()
        while True:
            self._position.inside = True
            try:
                if self._loop.member is not None:
                    self._loop.repairs.before.keep()
                    self._blocks.keep(frame)
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
            self._blocks.check()
        if step.close(error):
            self._meet_again(step)
            self._repeat.again(self._blocks.restore)
            return error is not None
        rng.set_outer(self._outer)
        self._device_draws = rng.device_state()
        if error is None:
            self._position.block_done()
            self._is_open, self._is_due, self._runs = False, True, 0
            self._is_alone = False
            finished = self._loop.state.finished
            self._loop.progress.page.total = finished + self._order.left(self._total)
            if self._is_first and self._loop.member is not None:
                self._repeat.check()
        self._blocks.leave()
        return False

    def _check_device_draws(self) -> None:
        """Raise SessionError: the script draws on the device between blocks.

        There the generator continues from the last block, which a new process has not run.
        """
        before, self._device_draws = self._device_draws, None
        if self._loop.member is None or before is None:
            return
        if not rng.is_same(before, rng.device_state()):
            raise SessionError(
                "between two blocks the script draws random numbers on the device, which a new "
                "process could not draw again: draw inside of the block, or on the CPU"
            )

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
                if not position.pending:
                    self._run_values.restore()
                result, has_result = (position.pending or [None])[0], bool(position.pending)
                self._join(in_run=True)
                if has_result and position.key > place:  # a rank has left the run
                    self._order.leave_run(outer)
                    break
                new = loop.generations.model  # the wrapper of the new generation
                args = tuple(new if each is model else each for each in args)
                kwargs = {n: new if each is model else each for n, each in kwargs.items()}
            else:
                position.results[stage].append(position.pending.pop())
                break
        self._runs = len(position.results[stage])
        self._device_draws = None
        return result

    def _run_once(
        self, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> T:
        loop = self._loop
        outer = rng.outer_states()
        loop.repairs.before.keep()
        before = self._variables.prints(sys._getframe())
        self._run_values.keep(sys._getframe())
        with loop.running():
            result = function(*args, **kwargs)
            self._variables.check_run(before, sys._getframe())
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
        self._is_alone = True
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

    def _look(self, frame: FrameType, *, outer: bool = False) -> None:
        """Keep the variables of the script at this place; in a new process, take them first.

        outer: an epoch begins. Raises SessionError: nobody could get one of them.
        """
        loop, position, variables = self._loop, self._position, self._variables
        if loop.member is None or position.epoch < 0:
            return
        place = Place(position.epoch, position.batch, self._stage.value)
        if variables.is_new and variables.place is not None:
            if not place.is_at(variables.place):
                return variables.open(frame, place)
            variables.take(frame)
        variables.look(frame, place, outer=outer)
        position.varies = variables.has_values
        own = loop.generations.own
        if own is None:
            position.variables = variables.state_dict()
        elif variables.has_values or self._has_copy:
            own.write(StateId(loop.state.finished, loop.state.generation))
            self._has_copy = variables.has_values

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

    def _keep(self, *, last: bool = False) -> bool | None:
        """Take a snapshot of the newest block, if one is due.

        last: all ranks of the generation are at the end. Returns None, or as _join() after a fault.
        """
        if self._is_due or last:
            self._is_due = False
            self._position.prepare = self._note
            try:
                self._loop.keep(last=last, alone=self._is_alone and not last)
            except Exception as error:
                if not self._loop.leave_step(error, inside=False):
                    raise
                return self._join()
            finally:
                self._position.prepare = None
        return None
