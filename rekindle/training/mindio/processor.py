"""A rank between its agent and the handlers that a framework has registered with MindIO's names.

What MindIO's processor does at its controller's word is done here at the coordinator's: a
generation ends, the device is stopped and cleaned, the ranks meet and hear who repairs whom, the
handlers do it, and training goes on from the step of the plan.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rekindle import names
from rekindle.errors import CheckpointError, SessionError, StaleError
from rekindle.protocol import agent as protocol
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.final_snapshot import LastWords, Moment
from rekindle.rank.progress import Progress
from rekindle.rank.step_vote import STATE, Gate, Listener, PeerGoneError
from rekindle.recovery.faults.fault import Kind
from rekindle.recovery.policy.plan import RankPlan, Source
from rekindle.training.mindio import report_signals as words
from rekindle.training.mindio.device_stop import Brake
from rekindle.training.mindio.enums import ReportState
from rekindle.training.mindio.handlers import ERROR, OK, UNHARMED, Handlers, for_mindspore
from rekindle.training.mindio.repairs import Said, joined, repair_of, replicas_of

_LOST = (OSError, PeerGoneError, StaleError)
_HEARD_S = 2.0  # within which a rank's end is known to all others
_KINDS = {
    ReportState.RS_RETRY: Kind.TRANSIENT,
    ReportState.RS_UCE: Kind.DEVICE_MEMORY,
    ReportState.RS_UCE_CORRUPTED: Kind.DEVICE_MEMORY,
    ReportState.RS_HCCL_FAILED: Kind.LINK,
}
_DAMAGED = (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)
# All ranks alike: what was wrong on one has gone into the update of all.
_SPOILT = (ReportState.RS_RETRY, ReportState.RS_UCE_CORRUPTED)


class Processor:
    """One rank. Started by hand, without an agent, it repairs nothing.

    channel: the line to the agent. takes_in: a new process may join those that go on in theirs
    (MindIO's ARF). finished: steps finished. repair_step: that training goes on from; 0: nothing
    was repaired. repair_type: what MindIO calls what is done at the moment. joins: this one is
    such a process, and has not joined yet.
    """

    def __init__(
        self, rank: int, handlers: Handlers, channel: Channel | None, *, takes_in: bool = False
    ) -> None:
        self.rank = rank
        self.channel = channel
        self.generation = self.finished = self.repair_step = 0
        self.repair_type = "unknown"
        self.joins = channel is not None and rank_environment.number(names.ENV_JOINS) > 0
        self._takes_in = takes_in
        self._replaced = False  # a process is gone whose place a new one takes
        self._handlers = handlers
        self._page = rank_environment.page()
        self.progress = Progress(self._page)
        self._slot = rank_environment.number(names.ENV_SLOT, rank)
        self._listener = Listener()
        self.gate = Gate(self._listener, self._page)
        self._peers: tuple[tuple[str, int], ...] = ()
        self._place = rank
        self._world = 0  # ranks; 0: not known yet
        self._brake = Brake(handlers.stop)
        self._last_words: LastWords | None = None
        self._formed = self._cleaned = self._met_at_end = False
        self._whole = self._torn = False  # the state is that of `finished` steps, or of none
        self._made = 0  # the generation that did the last step
        self._stepped = False  # a step of this generation was done
        self._done = self._lost = False  # all steps are done; this process cannot go on
        self._loads = self._uce = False  # what was reported
        self._loaded: int | None = None  # the step of the checkpoint that a handler has loaded
        self._shard: int | None = None
        self._types = 1  # optimizers whose states are repaired alike
        self._passed = 0
        self._ended = False

    # ---- what the training loop tells

    def start(self) -> None:
        """Meet the other ranks; who joins them builds its model first, and meets them then.

        Raises SessionError: this process cannot take part.
        """
        if self.joins and not self._takes_in:
            raise SessionError(
                "a new process cannot join ranks that go on in theirs (MindIO's ARF): enable_arf, "
                "or leave recover and recover-in-place out of the policy's strategies"
            )
        if self.channel is not None:
            if not self.joins:
                self._regroup(self.channel)
            self._last_words = LastWords(None, self._dump)

    def end(self) -> None:
        """All steps are done: leave, together with all others.

        Raises RuntimeError: another rank is not done, and this one has to go on with it.
        """
        if self.channel is None or self._ended:
            return
        self._done = True
        if self._regroup(self.channel):
            self._done, self._met_at_end = False, True
            raise words.stopped(self.finished)
        if self._last_words is not None:
            self._last_words.close()
        self._ended = True
        self.gate.leave()
        self._listener.close()

    def begin_update(self) -> None:
        """The optimizer begins to change the state. Raises RuntimeError: it must not."""
        if not self._brake.begin_update():
            if not for_mindspore():  # MindIO lets it run on there: the device is stopped
                raise words.stopped(self.finished)
            return
        if self._page is not None:
            self._page.begin_update()
        if self._last_words is not None:
            self._last_words.begin_step(self.finished)

    def end_update(self, step: int) -> None:
        """The state is that of so many steps."""
        if step < 1:
            raise SessionError(f"tft_end_updating_os({step}): steps are counted from 1")
        self.finished, self._made = step, self.generation
        self._brake.end_update(step)
        self.progress.end_step(step)
        if self._last_words is not None:
            self._last_words.end_step(step)
        if self.channel is not None and not self._stepped:
            self._stepped = True
            place = {"rank": self._slot, "generation": self.generation}
            self.channel.send(protocol.StepDone(finished=step, **place))

    def pause(self) -> None:
        """Between two steps: stand still if that is asked for. Raises RuntimeError then."""
        if self.channel is not None and self.channel.is_held(self.generation):
            self._handlers.sync_stream()
            self.channel.hold(self._slot, self.generation, self.finished)
            raise words.stopped(self.finished)

    def replicas(self, replica_info: Sequence[Mapping[str, Any]], world_size: int) -> None:
        """These hold the same state as this rank. Raises SessionError."""
        same = replicas_of(self.rank, replica_info)
        self._types = len(replica_info)
        self._shard = None if len(same) == world_size else min(same)

    def loaded(self, step: int) -> None:
        """A handler has loaded the checkpoint of this step."""
        self._loaded = step

    # ---- a fault

    def report(self, state: ReportState, code: str, error: BaseException | None) -> None:
        """Say what has broken off the step."""
        self._brake.break_off()
        if state is ReportState.RS_UNKNOWN:
            self._lost = True  # it raises, and its agent sees that
            return
        self._uce = state in _DAMAGED
        self._loads = state in _SPOILT
        kind = _KINDS.get(state)
        if kind is None or self.channel is None:
            return
        if kind is Kind.LINK and self.channel.is_over(self.generation):
            return
        said = f"{type(error).__name__}: {error}" if error is not None else state.name
        self._send_failure(self.channel, kind, f"{said} {code}".rstrip())

    def wait_clean(self) -> bool:
        """Wait until the device is stopped and cleaned; False: this process cannot go on."""
        if self.channel is None or self._lost:
            return False
        if self._met_at_end or self.joins:
            return True
        self.progress.meet()
        held = self.channel.is_held(self.generation) and not self.channel.is_over(self.generation)
        if not (held and self.channel.hold(self._slot, self.generation, self.finished)):
            self.channel.wait_over(self.generation)
        return self._clean()

    def wait_repaired(self) -> bool:
        """Meet the others, and repair what the plan says; False: this process cannot go on."""
        if self.channel is None or self._lost:
            return False
        if not self._met_at_end and not (self._formed and not self._brake.pulled):
            try:
                if not self._regroup(self.channel):
                    return False
            except Exception:
                traceback.print_exc(file=sys.stderr)
                self._send_failure(self.channel, Kind.DEVICE, "its state could not be repaired")
                return False
        self._met_at_end = False
        return True

    def _send_failure(self, channel: Channel, kind: Kind, error: str) -> None:
        channel.send(
            protocol.StepFailed(
                rank=self._slot,
                generation=self.generation,
                kind=kind,
                error=error,
                finished=self.finished,
            )
        )

    def _clean(self) -> bool:
        """Clean the device, once it is stopped."""
        if self._cleaned or not self._brake.pulled:
            return True
        self.repair_type = "recover" if self._replaced else "retry"
        self._torn = self._torn or self._uce or self._brake.updating
        answer = ERROR
        if self._brake.wait():
            try:
                answer = self._handlers.clean(self._uce)
            except Exception:
                traceback.print_exc(file=sys.stderr)
        if answer == UNHARMED:  # what was damaged is no part of the state
            self._uce, self._torn = False, self._brake.updating
        self._cleaned = answer in (OK, UNHARMED)
        self._lost = not self._cleaned
        return self._cleaned

    # ---- generations

    def _regroup(self, channel: Channel) -> bool:
        """Arrive, and form the next generation; False: training is over."""
        while True:
            self.progress.meet()
            told = self._whole or self._torn
            channel.send(
                protocol.Arrived(
                    rank=self._slot,
                    generation=self.generation,
                    shard=self._shard,
                    finished=self.finished if told else None,
                    torn=self._torn,
                    made=self._made,
                    done=self._done and self._whole and not self._torn,
                    passed=self._passed,
                    port=self._listener.port,
                    joins=self.joins,
                )
            )
            message = channel.wait(self.generation)
            if isinstance(message, protocol.Dismiss):
                self._passed = message.finished
                self.progress.leave()
                return False
            if self._form(channel, message):
                return True

    def _form(self, channel: Channel, form: protocol.Form) -> bool:
        """Form this generation, and repair what it says; False: it is over already."""
        if not self._clean():
            raise SessionError("the device could not be cleaned")
        self.gate.leave()
        self.generation, self._formed = form.generation, False
        self._place, self._peers = form.ranks[self._slot], form.peers
        self._world = self._world or form.world_size
        if form.store_port:  # groups are formed anew there: it is elsewhere if its host was lost
            os.environ.update(MASTER_ADDR=form.store_host, MASTER_PORT=str(form.store_port))
        self._passed = max(self._passed, form.passed)
        gate = self.gate = Gate(self._listener, self._page)
        channel.on_over = functools.partial(self._over, gate)
        if channel.is_over(form.generation):
            return False
        ready = protocol.StateReady(rank=self._slot, generation=form.generation)
        try:
            plan = form.plan[self._slot]
            self._check(plan, form.world_size)
            gate.form(form.generation, self._place, form.peers)
            step = self._repair(form, plan, gate)
        except CheckpointError as error:
            channel.send(msgspec.structs.replace(ready, error=str(error)))
            channel.wait_over(form.generation)
            return False
        except _LOST as error:
            if not channel.is_over(self.generation):
                self._send_failure(channel, Kind.LINK, f"{type(error).__name__}: {error}")
            channel.wait_over(form.generation)
            return False
        except Exception:
            # A framework's own collectives fail like that when another rank dies meanwhile.
            if not channel.is_over_within(form.generation, _HEARD_S):
                raise
            traceback.print_exc(file=sys.stderr)
            channel.wait_over(form.generation)
            return False
        self._go_on(form, step)
        channel.send(ready)
        return True

    def _go_on(self, form: protocol.Form, step: int) -> None:
        """Training goes on from a step."""
        self.finished = self.repair_step = step
        self._made = form.made
        self._whole, self._torn = True, False
        self._uce = self._loads = self._stepped = self._cleaned = False
        self.joins = self._replaced = False
        self.repair_type = "unknown"
        self._brake.release(step)
        self._formed = True
        self.progress.formed(step)

    def _check(self, plan: RankPlan, world_size: int) -> None:
        """Raises SessionError, CheckpointError: MindIO's handlers cannot do what is planned."""
        if world_size != self._world:
            raise SessionError("another size of the world (zit) needs MindIO: give --nnodes=N")
        if self.joins and plan.source is not Source.PEER:
            raise SessionError("this process was to join others, and no state is left of theirs")
        if plan.source not in (Source.SELF, Source.PEER, Source.FRESH):
            raise CheckpointError(f"MindIO's handlers take no state from a {plan.source.value}")

    def _repair(self, form: protocol.Form, plan: RankPlan, gate: Gate) -> int:
        """Have the handlers repair the state; returns the step that training goes on from.

        Raises OSError, PeerGoneError, StaleError: a peer is lost; whatever a handler raises.
        """
        if not (self._whole or self._torn or self.joins):
            return form.step  # it has just started: a state that its script loads is its own
        takes = ((plan.peer, self._place),) if plan.source is Source.PEER else ()
        said = Said(takes, self._loads, self.joins)
        told = msgspec.msgpack.encode(said) if said != Said() else b""
        heard = [msgspec.msgpack.decode(each, type=Said) for each in gate.gather(told)]
        call = repair_of(self._place, form.step, heard, rebuild=self._uce, types=self._types)
        self.repair_step, self._loaded = form.step, None
        if new := joined(heard):
            self.repair_type = "recover"
            self._handlers.rebuild_group(new)
        if call is not None:
            if takes and not self._handlers.has("repair"):
                raise SessionError("no repair handler is registered, and the state is damaged")
            self._torn = self._torn or bool(takes)
            self._handlers.repair(call)
        if any(each.loads for each in heard):
            self.repair_step = self._step_loaded()
        self._handlers.rollback(self.repair_step)
        gate.agree(self.repair_step, can=True)  # nobody goes on before all are repaired
        return self.repair_step

    def _step_loaded(self) -> int:
        if self._loaded is None:
            raise SessionError("no checkpoint was loaded (tft_report_load_ckpt_step)")
        return self._loaded

    def line(self, source: int, target: int) -> socket.socket:
        """Return a line from one rank to another, of which this is one, while it is repaired."""
        if source == self._place:
            return self.gate.accept(target, STATE)
        return self.gate.connect(self._peers[source], STATE)

    def _over(self, gate: Gate, over: protocol.Over) -> None:
        """Called by the channel's thread.

        Once the generation is formed its gate stays: whether a step is done behind it, all ranks
        have to agree on. A step that is under way is broken off where a device can do that.
        """
        if over.generation < self.generation:
            return
        if self._formed:
            self._replaced = over.replaced
            self._brake.pull(over.finished)
        else:
            gate.sever()

    def _dump(self, moment: Moment) -> bool:
        """Save a checkpoint, for this process has to end; it is not tried again."""
        self._save(moment.step)
        return True

    def _save(self, step: int) -> None:
        if step < 1 or self._torn or self._uce or not self._handlers.has("save_ckpt"):
            return
        if self._shard is not None:
            return  # others have pieces of the state, and nobody says whether they are there
        self.repair_type = "dump"
        info = [{"type": number, "ranks": [self.rank]} for number in range(self._types)]
        self._handlers.save(step, info)
        self._handlers.rename(step)
        self._handlers.exit()
