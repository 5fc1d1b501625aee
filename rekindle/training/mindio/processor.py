"""Connect a rank's agent with the handlers that a framework registers through MindIO's names.

MindIO's processor obeys MindIO's controller. This processor obeys Rekindle's coordinator. When a
generation ends, the rank's device is stopped and cleaned. The ranks meet and learn which rank
repairs which. Then the handlers repair the state, and training continues from the plan's step.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle import names
from rekindle.errors import SessionError
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.member import Member, text_of
from rekindle.rank.progress import HeldState, ProgressReporter
from rekindle.rank.snapshot_schedule import FinalSnapshot, Moment
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.mindio import enums as words
from rekindle.training.mindio.enums import ReportState
from rekindle.training.mindio.handlers import Handlers, for_mindspore
from rekindle.training.mindio.mindio_generations import MindIOGenerations
from rekindle.training.mindio.repairs import replicas_of

_KINDS = {
    ReportState.RS_RETRY: FaultKind.TRANSIENT,
    ReportState.RS_UCE: FaultKind.DEVICE_MEMORY,
    ReportState.RS_UCE_CORRUPTED: FaultKind.DEVICE_MEMORY,
    ReportState.RS_HCCL_FAILED: FaultKind.LINK,
}
_DAMAGED = (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)
# On all ranks alike: the update of each rank includes the wrong values of one rank.
_SPOILT = (ReportState.RS_RETRY, ReportState.RS_UCE_CORRUPTED)


class Processor:
    """One rank. A rank without an agent repairs nothing.

    channel: the connection to the agent. takes_in: a new process may join ranks that continue in
    theirs (MindIO's ARF). member: None without an agent.
    """

    def __init__(
        self, rank: int, handlers: Handlers, channel: Channel | None, *, takes_in: bool = False
    ) -> None:
        self.rank = rank
        self._takes_in = takes_in
        self._handlers = handlers
        self._page = rank_environment.page()
        self.progress = ProgressReporter(self._page)
        self._state = HeldState()
        self.generations = MindIOGenerations(
            rank_environment.slot_of_world(rank)[0],
            handlers,
            self._state,
            self.progress,
            joins_running_ranks=channel is not None
            and rank_environment.number(names.ENV_JOINS) > 0,
        )
        self._device_stop = self.generations.device_stop
        self.member: Member | None = None
        if channel is not None:
            slot = self.generations.slot
            self.member = Member(channel, slot, self.progress, self._state, self.generations)
        self._final_snapshot = FinalSnapshot(None, self._save_final_state)
        self._met_at_end = False
        self._lost = False  # this process cannot continue
        self._ended = False

    @property
    def finished(self) -> int:
        """The finished steps."""
        return self._state.finished

    @property
    def generation(self) -> int:
        """The generation that this rank is in; 0 without an agent."""
        return self.member.generation if self.member is not None else 0

    @property
    def joins_running_ranks(self) -> bool:
        """Whether this process is new, and has yet to join ranks that continue in theirs."""
        return self.generations.joins_running_ranks

    # ---- the training loop calls these

    def start(self) -> None:
        """Meet the other ranks. A process that joins running ranks builds its model first.

        Raises SessionError: this process cannot take part.
        """
        if self.joins_running_ranks and not self._takes_in:
            raise SessionError(
                "a new process cannot join running ranks without MindIO's ARF; set enable_arf, "
                "or remove recover and recover-in-place from the policy's strategies"
            )
        if self.member is not None:
            if not self.joins_running_ranks:
                self.member.join()
            self._final_snapshot.listen()

    def end(self) -> None:
        """Leave training together with all other ranks, once all steps are done.

        Raises RuntimeError: another rank is not done, and this rank must continue with it.
        """
        if self.member is None or self._ended:
            return
        self.generations.done = True
        if self.member.join():
            self.generations.done, self._met_at_end = False, True
            raise words.stopped(self.finished)
        self._final_snapshot.close()
        self._ended = True
        self.generations.close()

    def begin_update(self) -> None:
        """Begin an update of the optimizer. Raises RuntimeError: it must not begin."""
        if not self._device_stop.begin_update():
            if not for_mindspore():  # MindIO then lets it run: the device is stopped
                raise words.stopped(self.finished)
            return
        self._page.begin_update()
        self._final_snapshot.begin_step(self.finished)

    def end_update(self, step: int) -> None:
        """Record that the state includes `step` steps."""
        if step < 1:
            raise SessionError(f"tft_end_updating_os({step}): give a step of at least 1")
        self._state.step_done(step, self.generation)
        self._device_stop.end_update(step)
        self.progress.end_step(step)
        self._final_snapshot.end_step(step)
        if self.member is not None:
            self.member.step_done()

    def pause(self) -> None:
        """Wait between two steps if the agent requests it. Raises RuntimeError after that wait."""
        if self.member is not None and self.member.is_held:
            self._handlers.sync_stream()
            self.member.hold()
            raise words.stopped(self.finished)

    def replicas(self, replica_info: Sequence[Mapping[str, Any]], world_size: int) -> None:
        """Record the ranks with the same state. Raises SessionError: a group is invalid."""
        same = replicas_of(self.rank, replica_info)
        self.generations.types = len(replica_info)
        self.generations.shard = None if len(same) == world_size else min(same)

    def loaded(self, step: int) -> None:
        """Record that a handler has loaded the checkpoint of this step."""
        self.generations.loaded = step

    # ---- a fault

    def report(self, state: ReportState, code: str, error: BaseException | None) -> None:
        """Report the fault that broke the step."""
        self._device_stop.break_off()
        if state is ReportState.RS_UNKNOWN:
            self._lost = True  # the process raises an error, and its agent detects the exit
            return
        self.generations.damaged = state in _DAMAGED
        self.generations.loads = state in _SPOILT
        kind = _KINDS.get(state)
        if kind is None or self.member is None:
            return
        text = text_of(error) if error is not None else state.name
        self.member.report(kind, f"{text} {code}".rstrip(), own=kind is not FaultKind.LINK)

    def wait_clean(self) -> bool:
        """Wait until the device is stopped and cleaned; False: this process cannot continue."""
        if self.member is None or self._lost:
            return False
        if self._met_at_end or self.joins_running_ranks:
            return True
        self.progress.meet()
        held = self.member.is_held and not self.member.is_over
        if not (held and self.member.hold()):
            self.member.channel.wait_over(self.member.generation)
        self._lost = not self.generations.clean()
        return not self._lost

    def wait_repaired(self) -> bool:
        """Meet the others, and repair as the plan requires; False: this process cannot continue."""
        if self.member is None or self._lost:
            return False
        stands = self.generations.formed and not self._device_stop.pulled
        if not self._met_at_end and not stands:
            try:
                if not self.member.join():
                    return False
            except Exception:
                traceback.print_exc(file=sys.stderr)
                self.member.report(
                    FaultKind.DEVICE, "the repair handler could not repair its state", own=True
                )
                return False
        self._met_at_end = False
        return True

    def _save_final_state(self, moment: Moment) -> bool:
        """Save a checkpoint, because this process must end. Returns True, so there is no retry."""
        generations, step = self.generations, moment.step
        if step < 1 or self._state.torn or generations.damaged:
            return True
        # A rank with one shard of the state does not know whether the other ranks still run.
        if generations.shard is not None or not self._handlers.has("save_ckpt"):
            return True
        generations.repair_type = "dump"
        info = [{"type": number, "ranks": [self.rank]} for number in range(generations.types)]
        self._handlers.save(step, info)
        self._handlers.rename(step)
        self._handlers.exit()
        return True
