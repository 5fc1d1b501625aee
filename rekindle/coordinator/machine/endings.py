"""The fourth layer of the coordinator's mind: ending all ranks, to start anew or for good."""

from __future__ import annotations

from rekindle.coordinator.machine.checkpoints import Storing
from rekindle.coordinator.machine.job_state import (
    ENDING,
    RESCHEDULED,
    CancelTimer,
    End,
    Phase,
    Send,
    SetTimer,
)
from rekindle.coordinator.machine.ranks import Rank, Status, by_node
from rekindle.coordinator.machine.roster import Kept
from rekindle.names import KILLED_S
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import root_cause
from rekindle.recovery.faults.invalid_states import is_clean
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import LATE_S, Strategy

STOP_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_LAST_WORDS = "; last words: "  # as the policy's reason begins what is to be
GONE = (Status.ABSENT, Status.EXITED)


class Ending(Storing):
    """Restarts, stops and last words."""

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """Stop the job; `at_once` kills without grace (the second Ctrl-C)."""
        if self._outcome == RESCHEDULED and self.phase is not Phase.ENDED:
            self._outcome, self._stop_reason = "stopped", reason  # no further attempt is wanted
            self._record(journal.Stopping(reason=reason))
        if self.phase is Phase.DUMPING and at_once:
            self._at_once = True
            self._said = "the job was ended before they were written"
            self._finish()
        if self.phase in ENDING and not (self.phase is Phase.STOPPING and at_once):
            return
        self._at_once = at_once
        self._end_ranks(Phase.STOPPING, reason, 0.0 if at_once else STOP_GRACE_S)

    def _end_ranks(self, phase: Phase, reason: str, grace_s: float = STOP_GRACE_S) -> None:
        if phase is Phase.STOPPING and not self._stop_reason:
            self._stop_reason = reason
            self._record(journal.Stopping(reason=reason, outcome=self._outcome))
        self.phase = phase
        self._do(CancelTimer("leave"))
        self._do(CancelTimer("join"))
        self._kill(self.roster.ranks, grace_s)
        self._go_on_ending()

    def _kill(self, ranks: list[Rank], grace_s: float) -> None:
        nodes = self.roster.nodes
        alive = [rank for rank in ranks if rank.node in nodes and rank.status not in GONE]
        for number, doomed in by_node(alive).items():
            numbers = tuple(rank.rank for rank in doomed)
            self._do(Send(nodes[number].connection, p.Kill(ranks=numbers, grace_s=grace_s)))
            for rank in doomed:
                rank.status = Status.ENDING
        if alive:
            self._do(SetTimer("end", grace_s + KILLED_S))

    def _go_on_ending(self) -> None:
        """Take the next step once the ranks that had to end have ended."""
        if self.phase is Phase.REGROUPING:
            self._start_missing()
        elif not self.roster.all_are(*GONE) or self.roster.any_outside_but(*GONE):
            return
        elif self.phase is Phase.STOPPING:
            self._dump()
        elif self.phase is Phase.RESTARTING:
            self._start_anew()

    def _start_anew(self) -> None:
        """Start all ranks again; with a store of their own, for the dead one's keys stay in it."""
        for rank in self.roster.ranks:
            rank.status = Status.ABSENT
        self.roster.take_in(*self.roster.outside)
        self._newcomers = set()
        self._doubted = ()  # their ranks are started with all others
        self.incidents.answered()
        self.restarts += 1
        self._store.drop()
        self._session = self._formed = False
        self.phase = Phase.GATHERING
        if not self.roster.is_full:  # its time limit may have passed while ranks were ended
            self._do(SetTimer("node", self.spec.policy.node_timeout_s))
            self._late_passed = False
            self._do(SetTimer("late", LATE_S))
        self._start_missing()

    def _step_of_last_words(self) -> int | None:
        """The step of the newest snapshot, if it is newer than every checkpoint."""
        newest = self._worth_writing(set())
        return newest.state[0] if newest else None

    def _worth_writing(self, without: set[int]) -> Kept | None:
        """The newest snapshot that other nodes than these have, if no checkpoint is as new."""
        suspicions = self._suspicions
        newest = self.roster.newest_snapshot(without, suspicions)
        written = {made for node in self.roster.nodes.values() for made in node.checkpoints}
        clean = (step for step, made in written if is_clean((step, made), suspicions))
        return newest if newest and newest.state[0] > max(clean, default=0) else None

    def _dump(self) -> None:
        """Have the newest snapshot written, if that saves a step; then end."""
        allowed = Strategy.DUMP in self.spec.policy.strategies and not self._at_once
        newest = self._worth_writing(self._speechless) if allowed else None
        if newest is None:
            self._finish()
            return
        step, made = newest.state
        self.phase, self._dumping, self._dumpers = Phase.DUMPING, step, set(newest.places)
        self._record(journal.LastWords(node=min(self._dumpers), step=self._dumping))
        for node, ranks in newest.places.items():
            order = p.Dump(
                step=step,
                made=made,
                suspicions=tuple(self._suspicions),
                shards=ranks if newest.shards > 1 else {},
                of=newest.shards,
            )
            self._do(Send(self.roster.nodes[node].connection, order))
        self._do(SetTimer("dump", self.spec.policy.dump_timeout_s))

    def _on_dumped(self, node: int, message: p.CheckpointWritten) -> None:
        """A node has written last words, or could not."""
        if self.phase is not Phase.DUMPING or node not in self._dumpers:
            return
        if message.error:
            self._dump_failed(node, message.error)
            return
        self._do(CancelTimer("dump"))
        self._record(journal.LastWords(node=node, step=message.step, path=message.path))
        self._record(
            journal.Checkpointed(
                step=message.step,
                path=message.path,
                bytes=message.bytes,
                seconds=message.seconds,
            )
        )
        self._said = f"step {message.step} is at {message.path}"
        self._finish()

    def _dump_failed(self, node: int, error: str) -> None:
        """Ask others that have snapshots."""
        if self.phase is not Phase.DUMPING or node not in self._dumpers:
            return
        self._record(journal.LastWords(node=node, step=self._dumping, error=error))
        self._said = f"none, for node {node}: {error}"
        self._speechless.add(node)
        self._dump()

    def _on_ending_timer(self, name: str) -> None:
        """A time limit has passed while the job ends."""
        if name == "late" and self.phase is Phase.STOPPING:
            self._go_on_ending()
        elif name == "end" and self.phase is Phase.STOPPING:
            for rank in self.roster.ranks:
                if rank.status is Status.ENDING:  # its agent can still write last words
                    rank.status, rank.pid = Status.ABSENT, 0
            self._go_on_ending()
        elif name == "dump" and self.phase is Phase.DUMPING:
            limit_s = self.spec.policy.dump_timeout_s
            # Where there are several, which one holds the others up is not known.
            silent = min(self._dumpers)
            self._speechless |= self._dumpers
            self._dump_failed(silent, f"it has not written them within {limit_s:g} s")

    def _reason(self) -> str:
        """Say why the job failed: what is known now may be more than when it was decided."""
        if self._outcome != "failed" or not self.incidents.faults:
            return self._stop_reason
        cause = root_cause(self.incidents.faults)
        return self._stop_reason if cause.message in self._stop_reason else cause.message

    def _finish(self, reason: str = "") -> None:
        reason = reason or self._reason()
        if self._said or _LAST_WORDS in reason:
            said = self._said or "none, for all that had a snapshot are gone"
            reason = f"{reason.partition(_LAST_WORDS)[0]}{_LAST_WORDS}{said}"
        self.phase = Phase.ENDED
        finished = max(rank.finished for rank in self.roster.ranks)
        self._record(journal.Ended(outcome=self._outcome, reason=reason, finished=finished))
        succeeded = self._outcome == "succeeded"
        bye = p.Bye(status=0 if succeeded else 1, at_once=self._at_once)
        for agent in self.roster.agents():
            self._do(Send(agent.connection, bye))
        self._do(End(succeeded))
