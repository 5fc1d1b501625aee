"""A MindIO rank's part in each generation: its device stops, and handlers repair the state."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from rekindle import names
from rekindle.errors import CheckpointError, SessionError
from rekindle.protocol.rank import FormGeneration, GenerationEnded
from rekindle.rank import environment as rank_environment
from rekindle.rank.held_state import HeldState
from rekindle.rank.member import Arrival
from rekindle.rank.progress import ProgressReporter
from rekindle.rank.step_vote import LOST, STATE, Listener, StepVote
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.training.mindio.handlers import ERROR, OK, UNHARMED, Handlers
from rekindle.training.mindio.repairs import Said, joined, repair_of

UPDATE_S = 30.0  # MindIO waits as long for the end of an update
REACH_S = 0.5  # for one to begin that another rank has done: its gradients are on their way


class DeviceStop:
    """stop: stops the device; called by a thread of this class."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._limit: int | None = None  # steps that may still be finished; None: it is not pulled
        self._finished = 0
        self._updating = self._broken = self._stopped = self._failed = False

    @property
    def updating(self) -> bool:
        """Whether an update has begun and not ended: the state is of no step."""
        return self._updating

    @property
    def pulled(self) -> bool:
        """Whether the device is to be stopped, or was."""
        return self._limit is not None

    def begin_update(self) -> bool:
        """The update of the next step is about to begin; False: it must not."""
        with self._changed:
            if self._limit is not None and self._finished >= self._limit:
                self._changed.wait_for(lambda: self._stopped or self._limit is None)
                return False
            self._updating = True
            self._changed.notify_all()
            return True

    def end_update(self, finished: int) -> None:
        """It has ended: so many steps are finished."""
        with self._changed:
            self._updating, self._finished = False, finished
            self._changed.notify_all()

    def break_off(self) -> None:
        """The main thread has raised: nothing that it was at is to end any more."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def pull(self, finished: int) -> None:
        """Have the device stopped, by another thread. finished: steps that some rank has done."""
        with self._changed:
            if self._limit is not None:
                return
            self._limit = finished
        threading.Thread(target=self._run, name="rekindle-brake", daemon=True).start()

    def wait(self) -> bool:
        """Wait until the device is stopped; False: that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._limit is None)
            return not self._failed

    def release(self, finished: int) -> None:
        """Training goes on behind so many steps."""
        with self._changed:
            self._limit, self._finished = None, finished
            self._updating = self._broken = self._stopped = self._failed = False
            self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            limit = self._limit or 0
            self._changed.wait_for(
                lambda: self._broken or self._updating or self._finished >= limit, REACH_S
            )
            self._changed.wait_for(lambda: self._broken or not self._updating, UPDATE_S)
        failed = False
        try:
            self._stop()
        except Exception:
            traceback.print_exc(file=sys.stderr)
            failed = True
        with self._changed:
            self._stopped, self._failed = True, failed
            self._changed.notify_all()


class Generations:
    """Repairs the state of one rank; an adapter of `rekindle.rank.member.Member`.

    slot: the rank's number. joins: this process is new, and joins ranks that continue in theirs
    (MindIO's ARF). done: all steps are done. shard: of the state; None: all ranks hold the same.
    types: optimizers whose states are repaired alike. damaged: the device's memory is. loads: all
    ranks have to load a checkpoint. loaded: the step of the one that a handler has loaded.
    repair_step: the step that training continues from; 0: nothing was repaired.
    repair_type: MindIO's name for the recovery that runs. formed: the generation stands.
    """

    def __init__(
        self,
        slot: int,
        handlers: Handlers,
        state: HeldState,
        progress: ProgressReporter,
        *,
        joins: bool,
    ) -> None:
        self.slot = slot
        self.joins = joins
        self.done = self.damaged = self.loads = self.formed = False
        self.shard: int | None = None
        self.types = 1
        self.loaded: int | None = None
        self.repair_step = 0
        self.repair_type = "unknown"
        self.brake = DeviceStop(handlers.stop)
        self.listener = Listener()
        self.gate = StepVote(self.listener, progress.page)
        self._handlers = handlers
        self._state = state
        self._progress = progress
        self._place = slot
        self._world = 0  # ranks; 0: no generation has stood yet
        self._peers: tuple[tuple[str, int], ...] = ()
        self._cleaned = False
        self._replaced = False  # a new process takes the place of one that has ended

    def arrival(self) -> Arrival:
        """Return what MindIO adds to `Arrived`."""
        return Arrival(
            done=self.done and self._state.whole,
            shard=self.shard,
            port=self.listener.port,
            joins=self.joins,
        )

    def recover(self) -> None:
        """Clean the device, unless all steps are done: then it may be of no use any more.

        Raises SessionError: that failed.
        """
        if not self.done:
            self._must_clean()

    def _must_clean(self) -> None:
        if not self.clean():
            raise SessionError("the device could not be cleaned")

    def clean(self) -> bool:
        """Clean the device if the generation's end has stopped it; False: that failed."""
        if self._cleaned or not self.brake.pulled:
            return True
        self.repair_type = "recover" if self._replaced else "retry"
        if self.brake.updating:
            self._state.tear()
        answer = ERROR
        if self.brake.wait():
            try:
                answer = self._handlers.clean(self.damaged)
            except Exception:
                traceback.print_exc(file=sys.stderr)
        if answer == UNHARMED:
            self.damaged = False  # the damaged memory is no part of the state
        elif self.damaged:
            self._state.tear()
        self._cleaned = answer in (OK, UNHARMED)
        return self._cleaned

    def enter(self, form: FormGeneration) -> Callable[[GenerationEnded], None]:
        """Leave the gate of the former generation; returns what ends the new one here."""
        self._must_clean()
        self.gate.leave()
        self.formed = False
        self._place, self._peers = form.ranks[self.slot], form.peers
        self._world = self._world or form.world_size
        if form.store_port:  # groups meet there; the host changes if the old one was lost
            os.environ.update(MASTER_ADDR=form.store_host, MASTER_PORT=str(form.store_port))
        self.gate = StepVote(self.listener, self._progress.page)
        return functools.partial(self._stop, self.gate)

    def form(self, form: FormGeneration) -> None:
        """Meet the other ranks, and have the handlers repair the state."""
        plan = form.plan[self.slot]
        self._check(plan, form.world_size)
        self.gate.form(form.generation, self._place, form.peers)
        step = self._repair(form, plan)
        self._state.hold((step, form.made))
        self.repair_step, self.repair_type = step, "unknown"
        self.damaged = self.loads = self.joins = False
        self._cleaned = self._replaced = False
        self.brake.release(step)
        self.formed = True

    def failed(self, error: BaseException) -> FaultKind | None:
        """Return LINK if another rank is gone."""
        return FaultKind.LINK if isinstance(error, LOST) else None

    def line(self, source: int, target: int) -> socket.socket:
        """Return a connection between two ranks, of which this is one, during a repair."""
        if source == self._place:
            return self.gate.accept(target, STATE)
        return self.gate.connect(self._peers[source], STATE)

    def close(self) -> None:
        """Leave the gate, and accept no more connections."""
        self.gate.leave()
        self.listener.close()

    def _stop(self, gate: StepVote, over: GenerationEnded) -> None:
        """Break off the step that is under way, where the device can do that.

        The gate of a generation that stands stays open: at it all ranks agree whether a step is
        done.
        """
        if self.formed:
            self._replaced = over.replaced
            self.brake.pull(over.finished)
        else:
            gate.sever()

    def _check(self, plan: RankPlan, world_size: int) -> None:
        """Raises SessionError, CheckpointError: MindIO's handlers cannot do what the plan says."""
        if world_size != self._world:
            raise SessionError("another size of the world (zit) needs MindIO: give --nnodes=N")
        if self.joins and plan.source is not StateSource.PEER:
            raise SessionError("this process was to join others, and no state is left of theirs")
        if plan.source not in (StateSource.SELF, StateSource.PEER, StateSource.FRESH):
            raise CheckpointError(f"MindIO's handlers take no state from a {plan.source.value}")

    def _repair(self, form: FormGeneration, plan: RankPlan) -> int:
        """Have the handlers repair the state; returns the step that training continues from.

        Raises OSError, StaleError: a peer is lost; whatever a handler raises.
        """
        if self._state.known is None and not self.joins:
            return form.step  # the process has just started: its script loads the state
        takes = ((plan.peer, self._place),) if plan.source is StateSource.PEER else ()
        said = Said(takes, self.loads, self.joins)
        told = msgspec.msgpack.encode(said) if said != Said() else b""
        heard = [msgspec.msgpack.decode(each, type=Said) for each in self.gate.gather(told)]
        call = repair_of(self._place, form.step, heard, rebuild=self.damaged, types=self.types)
        self.repair_step, self.loaded = form.step, None
        if new := joined(heard):
            self.repair_type = "recover"
            self._handlers.rebuild_group(new)
        if call is not None:
            if takes and not self._handlers.has("repair"):
                raise SessionError("no repair handler is registered, and the state is damaged")
            if takes:
                self._state.tear()
            self._handlers.repair(call)
        if any(each.loads for each in heard):
            self.repair_step = self._step_loaded()
        self._handlers.rollback(self.repair_step)
        self.gate.agree(self.repair_step, can=True)  # until all ranks are repaired
        return self.repair_step

    def _step_loaded(self) -> int:
        if self.loaded is None:
            raise SessionError("no checkpoint was loaded (tft_report_load_ckpt_step)")
        return self.loaded


def joins_others(connected: bool) -> bool:
    """Whether this process is new and joins ranks that continue in theirs."""
    return connected and rank_environment.number(names.ENV_JOINS) > 0
