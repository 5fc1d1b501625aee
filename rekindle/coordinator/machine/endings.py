"""The end of all ranks, to restart them or to end the job."""

from __future__ import annotations

from rekindle.coordinator.machine.checkpoints import Checkpoints, StoreNews
from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.job_state import (
    ENDING,
    CancelTimer,
    End,
    JobState,
    Phase,
    Report,
    Send,
    SetTimer,
    Timer,
)
from rekindle.coordinator.machine.roster import GONE, Status
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import FaultKind, root_cause
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.journal import FAILED, RESCHEDULED, STOPPED, SUCCEEDED
from rekindle.recovery.policy.policy import LATE_S, Strategy

STOP_GRACE_S = 10.0  # between SIGTERM and SIGKILL

_FINAL_CHECKPOINT = "; final checkpoint: "  # begins the policy's text about the final checkpoint


class Endings:
    """Restarts, stops, final checkpoints, and the end of a job whose ranks have succeeded.

    outcome, stop_reason: how and why the attempt ends.
    """

    def __init__(
        self, job: JobState, fleet: Fleet, checkpoints: Checkpoints, report: Report
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._report = report
        self._roster = job.roster
        self._spec = job.spec
        self._incidents = job.incidents
        self.outcome = STOPPED
        self.stop_reason = ""
        self._at_once = False  # whether the ranks get no grace period
        self._writers: set[int] = set()  # the nodes that write a final checkpoint
        self._final_step = 0  # the step of the final checkpoint
        self._final_result = ""  # the result of the final checkpoint, as text
        self._speechless: set[int] = set()  # nodes that failed to write it

    def on_store_news(self, node: int, message: StoreNews, now: float) -> None:
        """Handle a node's message about checkpoints. The end of the job may wait for it."""
        match message:
            case p.CheckpointWritten(final=True):
                self._on_final_checkpoint(node, message)
            case p.ShardWritten(final=True) if message.error:
                if self._job.phase is not Phase.ENDED:
                    self.final_checkpoint_failed(node, message.error)
            case _:
                self._checkpoints.on_news(node, message, now)
        self._checkpoints.write_next()
        self._on_stored(node, message)

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """Stop the job. `at_once` kills the ranks without grace (the second Ctrl-C)."""
        if self.outcome == RESCHEDULED and self._job.phase is not Phase.ENDED:
            self.outcome, self.stop_reason = STOPPED, reason  # the next attempt is cancelled
            self._job.record(journal.Stopping(reason=reason))
        if self._job.phase is Phase.FINAL_CHECKPOINT and at_once:
            self._at_once = True
            self._final_result = "a second stop ended the job before its nodes wrote it"
            self._finish()
        if self._job.phase in ENDING and not (self._job.phase is Phase.STOPPING and at_once):
            return
        self._at_once = at_once
        self.end_ranks(Phase.STOPPING, reason, 0.0 if at_once else STOP_GRACE_S)

    def end_ranks(self, phase: Phase, reason: str, grace_s: float = STOP_GRACE_S) -> None:
        """End all ranks, to start them again (RESTARTING) or permanently (STOPPING)."""
        self._job.stop_inspection()
        if phase is Phase.STOPPING and not self.stop_reason:
            self.stop_reason = reason
            self._job.record(journal.Stopping(reason=reason, outcome=self.outcome))
        self._job.enter(phase)
        self._job.do(CancelTimer(Timer.LEAVE))
        self._job.do(CancelTimer(Timer.JOIN))
        if phase is Phase.RESTARTING:
            self._fleet.release_prepared()
        self._fleet.kill(self._roster.ranks, grace_s, last=phase is Phase.STOPPING)
        self.go_on_ending()

    def go_on_ending(self) -> None:
        """Take the next step once the ranks that had to end have ended."""
        if self._job.phase is Phase.REGROUPING:
            self._fleet.start_missing()
        elif not self._roster.all_are(*GONE) or self._roster.any_outside_but(*GONE):
            return
        elif self._job.phase is Phase.STOPPING:
            self._write_final_checkpoint()
        elif self._job.phase is Phase.RESTARTING:
            self._start_anew()

    def _start_anew(self) -> None:
        """Start all ranks again, with a new store: the old store has keys of ended processes."""
        for rank in self._roster.ranks:
            rank.status = Status.ABSENT
        self._roster.take_in(*self._roster.outside)
        self._job.newcomers = set()
        self._job.paused_for = None
        self._incidents.doubted = ()  # all ranks start again, also their ranks
        self._incidents.answered()
        self._job.restarts += 1
        self._job.store.drop()
        self._job.session = self._job.formed = self._job.met = False
        self._job.enter(Phase.GATHERING)
        if not self._roster.is_full:  # the time limit may have passed while ranks ended
            self._job.do(SetTimer(Timer.NODE, self._spec.policy.node_timeout_s))
            self._fleet.late_passed = False
            self._job.do(SetTimer(Timer.LATE, LATE_S))
        self._fleet.start_missing()

    def _write_final_checkpoint(self) -> None:
        """Order the newest snapshot as the final checkpoint. Finish if it does not save a step."""
        allowed = Strategy.DUMP in self._spec.policy.strategies and not self._at_once
        newest = self._checkpoints.worth_writing(self._speechless) if allowed else None
        if newest is None:
            self._finish()
            return
        step, generation = newest.state
        self._job.enter(Phase.FINAL_CHECKPOINT)
        self._final_step, self._writers = step, set(newest.places)
        self._job.record(journal.FinalCheckpoint(node=min(self._writers), step=self._final_step))
        for node, ranks in newest.places.items():
            order = p.WriteFinalCheckpoint(
                step=step,
                generation=generation,
                suspicions=tuple(self._job.suspicions),
                shards=ranks if newest.shards > 1 else {},
                of=newest.shards,
            )
            self._job.do(Send(self._roster.nodes[node].connection, order))
        self._job.do(SetTimer(Timer.FINAL_CHECKPOINT, self._spec.policy.dump_timeout_s))

    def _on_final_checkpoint(self, node: int, message: p.CheckpointWritten) -> None:
        """Handle a node that has written the final checkpoint, or failed to write it."""
        if self._job.phase is not Phase.FINAL_CHECKPOINT or node not in self._writers:
            return
        if message.error:
            self.final_checkpoint_failed(node, message.error)
            return
        self._job.do(CancelTimer(Timer.FINAL_CHECKPOINT))
        self._job.record(journal.FinalCheckpoint(node=node, step=message.step, path=message.path))
        self._job.record(
            journal.Checkpointed(
                step=message.step,
                path=message.path,
                bytes=message.bytes,
                seconds=message.seconds,
            )
        )
        self._final_result = f"step {message.step} is at {message.path}"
        self._finish()

    def final_checkpoint_failed(self, node: int, error: str) -> None:
        """Record that a node failed to write the final checkpoint, and ask other nodes for it."""
        if self._job.phase is not Phase.FINAL_CHECKPOINT or node not in self._writers:
            return
        self._job.record(journal.FinalCheckpoint(node=node, step=self._final_step, error=error))
        self._final_result = f"none, because node {node} failed to write it: {error}"
        self._speechless.add(node)
        self._write_final_checkpoint()

    def on_late(self, now: float) -> None:
        """Continue to end the job. No more agents come."""
        if self._job.phase is Phase.STOPPING:
            self.go_on_ending()

    def on_unkillable(self, now: float) -> None:
        """Give up ranks that SIGKILL does not end. Their agents can write a final checkpoint."""
        if self._job.phase is Phase.STOPPING:
            for rank in self._roster.ranks:
                if rank.status is Status.ENDING:
                    rank.status, rank.pid = Status.ABSENT, 0
            self.go_on_ending()

    def on_final_checkpoint_late(self, now: float) -> None:
        """Ask other nodes for the final checkpoint, because its time limit has passed."""
        if self._job.phase is Phase.FINAL_CHECKPOINT:
            limit_s = self._spec.policy.dump_timeout_s
            # If there are several nodes, the machine does not know which one delays the others.
            silent = min(self._writers)
            self._speechless |= self._writers
            self.final_checkpoint_failed(
                silent, f"it did not write its shards within {limit_s:g} s"
            )

    def _on_stored(self, node: int, message: StoreNews) -> None:
        """Handle a checkpoint that was committed or failed. The job's end may wait for it."""
        if isinstance(message, p.CheckpointWritten):
            self._roster.nodes[node].committing = -1
        if self._roster.all_are(Status.EXITED) and self._job.phase not in ENDING:
            self.on_good_exit()

    def on_good_exit(self) -> None:
        if self._roster.all_are(Status.EXITED) and not self._checkpoints.are_written:
            return
        if self._roster.all_are(Status.EXITED):
            why = f"all {self._roster.world_size} ranks ended with exit status 0"
            self._finish(why, outcome=SUCCEEDED)
        else:
            self.miss_exited()

    def miss_exited(self) -> None:
        """Report a rank that ended well, if others regroup or all others wait for it."""
        if self._job.phase in (Phase.RESTARTING, *ENDING):
            return
        regrouping = self._job.phase is Phase.REGROUPING and self._job.formed
        if regrouping or self._roster.all_are(Status.EXITED, Status.WAITING):
            self.blame_exited()

    def blame_exited(self) -> None:
        gone = self._roster.those(Status.EXITED)[0]
        gone.status = Status.ABSENT
        text = f"rank {gone.rank} ended with exit status 0 before the others had finished"
        self._report(self._job.fault(FaultKind.USER_CODE, gone, text))

    def _reason(self) -> str:
        """Return why the attempt ended. The cause of a failure may appear after the decision."""
        if self.outcome != FAILED or not self._incidents.faults:
            return self.stop_reason
        cause = root_cause(self._incidents.faults)
        return self.stop_reason if cause.message in self.stop_reason else cause.message

    def _finish(self, reason: str = "", *, outcome: str = "") -> None:
        reason = reason or self._reason()
        if self._final_result or _FINAL_CHECKPOINT in reason:
            result = self._final_result or "none, because all nodes with a snapshot are lost"
            reason = f"{reason.partition(_FINAL_CHECKPOINT)[0]}{_FINAL_CHECKPOINT}{result}"
        self._job.enter(Phase.ENDED)
        self.outcome = outcome or self.outcome
        finished = max(rank.finished for rank in self._roster.ranks)
        self._job.record(journal.Ended(outcome=self.outcome, reason=reason, finished=finished))
        succeeded = self.outcome == SUCCEEDED
        bye = p.EndAgent(status=0 if succeeded else 1, at_once=self._at_once)
        for agent in self._roster.agents():
            self._job.do(Send(agent.connection, bye))
        self._job.do(End(succeeded))
