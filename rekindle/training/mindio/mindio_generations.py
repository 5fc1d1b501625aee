"""Do a MindIO rank's part in each generation: stop its device, and have handlers repair it."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from rekindle.errors import CheckpointError, SessionError
from rekindle.protocol.rank import FormGeneration, GenerationEnded
from rekindle.rank.member import Arrival
from rekindle.rank.progress import HeldState, ProgressReporter
from rekindle.rank.step_vote import STATE, StepVote, VotingGenerations
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.states import StateId
from rekindle.training.mindio.handlers import ERROR, OK, UNHARMED, Handlers
from rekindle.training.mindio.repairs import RepairRequest, joined, repair_of

UPDATE_S = 30.0  # MindIO waits for the same time until an update ends
REACH_S = 0.5  # for an update to begin that another rank has done: its gradients are on their way


class DeviceStop:
    """Stop the device once the update that runs has ended.

    stop: stops the device; a thread of this class calls it.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._changed = threading.Condition()
        self._limit: int | None = None  # steps that may still finish; None: no stop is requested
        self._finished = 0
        self._updating = self._broken = self._stopped = self._failed = False

    @property
    def updating(self) -> bool:
        """Whether an update has begun and not ended: the state then belongs to no step."""
        return self._updating

    @property
    def pulled(self) -> bool:
        """Whether a stop of the device is requested or done."""
        return self._limit is not None

    def begin_update(self) -> bool:
        """Begin the update of the next step; False: it must not begin."""
        with self._changed:
            if self._limit is not None and self._finished >= self._limit:
                self._changed.wait_for(lambda: self._stopped or self._limit is None)
                return False
            self._updating = True
            self._changed.notify_all()
            return True

    def end_update(self, finished: int) -> None:
        """End the update. finished: the number of steps that are finished now."""
        with self._changed:
            self._updating, self._finished = False, finished
            self._changed.notify_all()

    def break_off(self) -> None:
        """Record that the main thread has raised an error: its update cannot end."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def pull(self, finished: int) -> None:
        """Start a thread that stops the device. finished: the steps that some rank has done."""
        with self._changed:
            if self._limit is not None:
                return
            self._limit = finished
        threading.Thread(target=self._run, name="rekindle-device-stop", daemon=True).start()

    def wait(self) -> bool:
        """Wait until the device is stopped; False: the stop failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._limit is None)
            return not self._failed

    def release(self, finished: int) -> None:
        """Continue training after `finished` steps."""
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


class MindIOGenerations(VotingGenerations):
    """Repairs the state of one rank; an adapter of `rekindle.rank.member.Member`.

    slot: the rank's number. joins: this process is new, and joins ranks that continue (MindIO's
    ARF).
    done: all steps are done. shard: the shard of the state that this rank holds; None: all ranks
    hold the same state. types: the number of optimizers, whose states are repaired alike. damaged:
    the device's memory is damaged. loads: all ranks must load a checkpoint. loaded: the step of the
    checkpoint that a handler has loaded.
    repair_step: the step from which training continues; 0: there was no repair.
    repair_type: MindIO's name for the recovery that runs.
    """

    def __init__(
        self,
        slot: int,
        handlers: Handlers,
        state: HeldState,
        progress: ProgressReporter,
        *,
        joins_running_ranks: bool,
    ) -> None:
        super().__init__(state, progress)
        self.slot = slot
        self.joins_running_ranks = joins_running_ranks
        self.done = self.damaged = self.loads = False
        self.shard: int | None = None
        self.types = 1
        self.loaded: int | None = None
        self.repair_step = 0
        self.repair_type = "unknown"
        self.device_stop = DeviceStop(handlers.stop)
        self._handlers = handlers
        self._place = slot
        self._world = 0  # number of ranks; 0: no generation was formed yet
        self._peers: tuple[tuple[str, int], ...] = ()
        self._cleaned = False
        self._process_lost = False  # a new process replaces one that has ended

    def arrival(self) -> Arrival:
        """Return the values that MindIO adds to `Arrived`."""
        return Arrival(
            done=self.done and self._state.whole,
            shard=self.shard,
            port=self.listener.port,
            needs_peer=self.joins_running_ranks,
        )

    def recover(self) -> None:
        """Clean the device, unless all steps are done: the device may then be unusable.

        Raises SessionError: the cleaning failed.
        """
        if not self.done:
            self._must_clean()

    def _must_clean(self) -> None:
        if not self.clean():
            raise SessionError("the clean handler failed to clean the device")

    def clean(self) -> bool:
        """Clean the device if the generation's end has stopped it; False: the cleaning failed."""
        if self._cleaned or not self.device_stop.pulled:
            return True
        self.repair_type = "recover" if self._process_lost else "retry"
        if self.device_stop.updating:
            self._state.tear()
        answer = ERROR
        if self.device_stop.wait():
            try:
                answer = self._handlers.clean(self.damaged)
            except Exception:
                traceback.print_exc(file=sys.stderr)
        if answer == UNHARMED:
            self.damaged = False  # the damaged memory does not belong to the state
        elif self.damaged:
            self._state.tear()
        self._cleaned = answer in (OK, UNHARMED)
        return self._cleaned

    def enter(self, form: FormGeneration) -> Callable[[GenerationEnded], None]:
        """Leave the former generation's gate, and return a function that ends the new one here."""
        self._must_clean()
        self._place, self._peers = form.ranks[self.slot], form.peers
        self._world = self._world or form.world_size
        if form.store_port:  # groups meet there; the host changes if the old host was lost
            os.environ.update(MASTER_ADDR=form.store_host, MASTER_PORT=str(form.store_port))
        return functools.partial(self._stop, self._new_gate())

    def form(self, form: FormGeneration) -> None:
        """Meet the other ranks, and call the handlers that repair the state."""
        plan = form.plan[self.slot]
        self._check(plan, form.world_size)
        self.gate.form(form.generation, self._place, form.peers)
        step = self._repair(form, plan)
        self._state.hold(StateId(step, form.state_generation))
        self.repair_step, self.repair_type = step, "unknown"
        self.damaged = self.loads = self.joins_running_ranks = False
        self._cleaned = self._process_lost = False
        self.device_stop.release(step)
        self.formed = True

    def connection(self, source: int, target: int) -> socket.socket:
        """Return a connection between two ranks during a repair; this rank is one of them."""
        if source == self._place:
            return self.gate.accept(target, STATE)
        return self.gate.connect(self._peers[source], STATE)

    def _stop(self, gate: StepVote, over: GenerationEnded) -> None:
        """Break off the step that runs, if the device can do that.

        The gate of a formed generation stays open: all ranks agree there whether a step is done.
        """
        if self.formed:
            self._process_lost = over.process_lost
            self.device_stop.pull(over.finished)
        else:
            gate.sever()

    def _check(self, plan: RankPlan, world_size: int) -> None:
        """Check the plan. Raises SessionError, CheckpointError: MindIO's handlers cannot do it."""
        if world_size != self._world:
            raise SessionError(
                "only MindIO can change the size of the world (zit); give --nnodes=N"
            )
        if self.joins_running_ranks and plan.source is not StateSource.PEER:
            raise SessionError("this process must join other ranks, but no rank has their state")
        if plan.source not in (StateSource.SELF, StateSource.PEER, StateSource.FRESH):
            raise CheckpointError(
                f"MindIO's handlers cannot load a state from a {plan.source.value}"
            )

    def _repair(self, form: FormGeneration, plan: RankPlan) -> int:
        """Call the handlers that repair the state, and return the step to continue from.

        Raises OSError, StaleError: a peer is lost. Errors of a handler pass through.
        """
        if self._state.known_steps is None and not self.joins_running_ranks:
            return form.step  # the process has just started: its script loads the state
        takes = ((plan.peer, self._place),) if plan.source is StateSource.PEER else ()
        request = RepairRequest(takes, self.loads, self.joins_running_ranks)
        encoded = msgspec.msgpack.encode(request) if request != RepairRequest() else b""
        requests = [
            msgspec.msgpack.decode(each, type=RepairRequest) for each in self.gate.gather(encoded)
        ]
        call = repair_of(self._place, form.step, requests, rebuild=self.damaged, types=self.types)
        self.repair_step, self.loaded = form.step, None
        if new := joined(requests):
            self.repair_type = "recover"
            self._handlers.rebuild_group(new)
        if call is not None:
            if takes and not self._handlers.has("repair"):
                raise SessionError(
                    "the state is damaged, but the script has not registered a repair handler"
                )
            if takes:
                self._state.tear()
            self._handlers.repair(call)
        if any(each.loads for each in requests):
            self.repair_step = self._step_loaded()
        self._handlers.rollback(self.repair_step)
        self.gate.agree(self.repair_step, can=True)  # until all ranks are repaired
        return self.repair_step

    def _step_loaded(self) -> int:
        if self.loaded is None:
            raise SessionError(
                "the script did not report a loaded checkpoint (tft_report_load_ckpt_step)"
            )
        return self.loaded
