"""Compare the states of ranks that should hold the same one, by their digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.job_state import JobState, Phase, Report, SetTimer, Timer
from rekindle.coordinator.machine.roster import Status
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import StateDigest, beat_interval
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.plan import StateSource
from rekindle.recovery.policy.policy import Replicas
from rekindle.states import StateId, is_clean
from rekindle.words import listed

_STATE = "parameters or optimizer"
_BEATS = 4  # beats of an agent between two messages about equal states
_ASKS = 2
_NAMED = 4  # tensors in a text; the signature of the fault has all of them
_SKIPPED = (
    "a step may have skipped the optimizer's step on one rank (a `continue`), the gradients were "
    "not all-reduced, or an object that changes the update is missing in extra"
)
_PARTS = (
    "if each rank holds a part of the state of its own (a pipeline, tensor parallelism), give "
    "Session(shard=...); otherwise let Session(ddp=True) send the weights of rank 0 and "
    "all-reduce the gradients"
)


class Reports(msgspec.Struct):
    """The digests of one state. ranks: those that have reported it.

    groups: the digests of ranks that should hold the same state, by number of the group and rank.
    unequal: the number of a group with different digests.
    """

    ranks: set[int] = set()
    groups: dict[int, dict[int, int]] = {}
    unequal: int | None = None

    def add(self, rank: int, group: int, value: int) -> None:
        """Note a digest."""
        values = self.groups.setdefault(group, {})
        values[rank] = value
        self.ranks.add(rank)
        if value != next(iter(values.values())):
            self.unequal = group

    @property
    def different(self) -> dict[int, int]:
        """Return the digests of a group that are not equal, by rank."""
        return {} if self.unequal is None else self.groups[self.unequal]


class ReplicaComparison:
    """Compares the digests of all ranks, by generation and step.

    A difference ends the generation. When all ranks wait, it becomes a fault, with the names of
    the tensors. All later states are suspect.
    """

    def __init__(
        self, job: JobState, fleet: Fleet, generations: Generations, report: Report
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._generations = generations
        self._report = report
        self._roster = job.roster
        self._groups: dict[int, int] = {}  # by rank: ranks with the same number share their state
        self._items: dict[int, tuple[str, ...]] = {}  # by rank: the names of other objects
        self._seen: dict[StateId, Reports] = {}
        self._others: dict[tuple[StateId, str], dict[int, int]] = {}
        self._told: set[str] = set()  # objects whose difference is recorded
        self._equal = 0  # the newest step after which all ranks agreed
        self._different: StateId | None = None
        self._asks = 0  # times that waiting ranks were asked for the tensors of that state
        self._kept = (0, 0.0)  # the equal step that the agents know, and when they got it

    def on_beat(self, message: p.Heartbeat, now: float) -> None:
        """Compare the new digests of a node's ranks. The agents keep a snapshot of an equal step.

        They learn an equal step at most every fourth beat.
        """
        for rank, digests in message.digests.items():
            self._add(rank, digests)
        known, at = self._kept
        pause_s = _BEATS * beat_interval(self._job.spec.nodes)
        if self._equal > known and now - at >= pause_s and self._job.spec.snapshot_every:
            self._kept = self._equal, now
            self._fleet.tell_nodes(p.StatesEqual(step=self._equal))

    def on_exited(self, message: p.Exited) -> None:
        """Compare the last digests of a rank that has ended."""
        self._add(message.rank, message.digests)

    def on_arrived(self, message: p.Arrived) -> None:
        """Compare the present state of a rank that waits for a generation."""
        self._groups[message.rank], self._items[message.rank] = message.replicas, message.items
        self._add(message.rank, message.digests)

    def formed(self) -> None:
        """Begin a generation whose ranks all hold the planned state."""
        plan = self._generations.planned
        assert plan is not None
        self._equal = min(self._equal, plan.step)
        self._kept = min(self._kept[0], plan.step), self._kept[1]
        if all(each.source in (StateSource.CHECKPOINT, StateSource.PEER) for each in plan.ranks):
            self._equal = plan.step
        self._seen, self._others = {}, {}

    def differ(self) -> bool:
        """Report a fault if ranks hold different states. Return whether there is one.

        All ranks wait, so their arrivals name the tensors.
        """
        state, self._different = self._different, None
        if state is None or not is_clean(state, self._job.suspicions):
            return False
        values = self._seen[state].different if state in self._seen else {}
        lives = [self._generations.live(rank) for rank in self._roster.world]
        if not values or (self._job.spec.policy.replicas is Replicas.WARN and None not in lives):
            return False
        if self._asks < _ASKS and self._lacks_tensors(values):
            self._different = state
            self._ask(state)
            return True
        self._asks = 0
        names = self._tensors(values)
        alone, others = _sides(values)
        first = self._roster.ranks[alone[0]]
        fault = self._job.fault(FaultKind.REPLICAS, first, self._text(state, alone, others, names))
        self._job.suspect_states(self._equal, rank=first.rank if len(alone) == 1 else -1)
        self._report(
            msgspec.structs.replace(
                fault,
                rank=first.rank if len(alone) == 1 else -1,
                node=first.node if len(alone) == 1 else -1,
                finished=state.step,
                signature=", ".join(names),
            )
        )
        return True

    def _add(self, rank: int, digests: Iterable[StateDigest]) -> None:
        for each in digests:
            state = StateId(each.step, each.generation)
            if not is_clean(state, self._job.suspicions):
                continue  # ranks have left this state
            if each.item:
                self._add_other(rank, state, each)
                continue
            reports = self._seen.setdefault(state, Reports())
            reports.add(rank, self._groups.get(rank, 0), each.value)
            if reports.different:
                self._on_difference(state, reports.different)
            elif len(reports.ranks) == self._roster.world_size:
                self._equal = max(self._equal, state.step)
                self._seen = {s: found for s, found in self._seen.items() if s > state}

    def _on_difference(self, state: StateId, values: Mapping[int, int]) -> None:
        job = self._job
        if job.spec.policy.replicas is Replicas.WARN:
            self._tell(state, _STATE, values)
        elif self._different is None and job.phase in (Phase.TRAINING, Phase.RESTORING):
            cause = p.Cause(kind=FaultKind.REPLICAS.value, ranks=tuple(sorted(values)))
            self._generations.declare_over(cause, compare=state)
            self._await_again()
        self._different = self._different or state

    def _ask(self, state: StateId) -> None:
        """Let the waiting ranks arrive again, with the digests of their tensors."""
        job = self._job
        self._asks += 1
        job.do(SetTimer(Timer.LEAVE, job.spec.policy.leave_timeout_s))
        self._fleet.tell_nodes(
            p.GenerationEnded(generation=job.generation, cause=job.cause, compare=state)
        )
        self._await_again()

    def _await_again(self) -> None:
        for rank in self._roster.those(Status.WAITING):
            rank.status = Status.LEAVING

    def _lacks_tensors(self, values: Mapping[int, int]) -> bool:
        """Return whether one of these ranks has a state, and has not named its tensors.

        Its arrival may have been under way when it was asked.
        """
        arrivals = (self._roster.ranks[rank].arrived for rank in values)
        return any(a is not None and a.finished is not None and not a.tensors for a in arrivals)

    def _tensors(self, values: Mapping[int, int]) -> list[str]:
        """Return the names of the tensors that differ between these ranks; empty: unknown."""
        arrivals = [self._roster.ranks[rank].arrived for rank in values]
        known = [each.tensors for each in arrivals if each is not None and each.tensors]
        names = {name for tensors in known for name in tensors}
        return sorted(name for name in names if len({each.get(name) for each in known}) > 1)

    def _text(
        self, state: StateId, alone: tuple[int, ...], others: tuple[int, ...], names: list[str]
    ) -> str:
        step, equal = state.step, self._equal
        if len(alone) == 1:
            who = f"rank {alone[0]} holds another state than {listed('rank', others)}"
        else:
            who = f"{listed('rank', sorted((*alone, *others)))} hold different states"
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = f" ({', '.join(names[:_NAMED])}{more})" if names else ""
        if not equal:
            return f"{who} after step {step}{which}, and no earlier comparison was equal; {_PARTS}"
        steps = f"step {step}" if step == equal + 1 else f"steps {equal + 1} to {step}"
        memory = "its memory or device may have changed a value; " if len(others) > 1 else ""
        return (
            f"{who} after step {step}{which}, and the same after step {equal}, so {steps} may be "
            f"wrong on all ranks; {memory}{_SKIPPED}"
        )

    # ---- other objects

    def _add_other(self, rank: int, state: StateId, digest: StateDigest) -> None:
        items = self._items.get(rank, ())
        if digest.item > len(items):
            return  # sent before the rank's arrival is known
        item = items[digest.item - 1]
        values = self._others.setdefault((state, item), {})
        values[rank] = digest.value
        if digest.value != next(iter(values.values())):
            self._tell(state, item, values)
        elif len(values) == self._roster.world_size:
            del self._others[state, item]

    def _tell(self, state: StateId, item: str, values: Mapping[int, int]) -> None:
        """Record once that ranks hold different values of an object."""
        if item not in self._told and self._job.phase is not Phase.ENDED:
            self._told.add(item)
            self._job.record(
                journal.RanksDiffer(item=item, step=state.step, ranks=tuple(sorted(values)))
            )


def _sides(values: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that differ from most others, and the others; no others: none agree.

    values: the digest of each rank.
    """
    by_value: dict[int, list[int]] = {}
    for rank, value in sorted(values.items()):
        by_value.setdefault(value, []).append(rank)
    most = max(by_value.values(), key=len)
    if 2 * len(most) <= len(values):
        return tuple(sorted(values)), ()
    return tuple(rank for rank in sorted(values) if rank not in most), tuple(most)
