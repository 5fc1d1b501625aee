"""Replay one run: a policy's decisions about the faults of a trace, and their costs. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.policy.history import Situation
from rekindle.recovery.policy.policy import INNER, LADDER, LATE_S, Strategy
from rekindle.simulation.costs import StrategyRow
from rekindle.simulation.job import Job, Setting
from rekindle.simulation.memory import RecoveryBudgets
from rekindle.simulation.outcome import Loss, Outcome
from rekindle.simulation.progress import Source
from rekindle.simulation.trace import Cause, Strike

ENDS = (Strategy.DUMP, Strategy.FAIL)
GONE = (FaultKind.NODE_LOST, FaultKind.EVICTION)
_OF_NODES = (*GONE, FaultKind.NODE)
_WEIGHT = {strategy: weight for weight, strategy in enumerate(Strategy)}
_AGE = {source: age for age, source in enumerate(Source)}


class Broken(msgspec.Struct, kw_only=True):
    """Hold a fault on one node.

    `finished` is the number of steps that the job had finished. `moved` means that another node has
    the place. `missed` means that this other node did not arrive in time. `again` means that the
    fault recurs, because the recovery did not remove its cause.
    """

    strike: Strike
    node: int
    finished: int
    moved: bool = False
    missed: bool = False
    again: bool = False
    chance: random.Random | None = None

    @property
    def is_gone(self) -> bool:
        """Return whether the node has disappeared and the job has not requested another."""
        return self.strike.row.kind in GONE and not self.moved

    def needs_to_move(self, strategy: Strategy) -> bool:
        """Return whether a strategy that can replace the node does so.

        A person replaces the node only if it is the cause.
        """
        return strategy not in ENDS or (self.strike.cause is Cause.PLACE and not self.moved)

    def fault(self, *, at: float, host: str, per_node: int) -> Fault:
        """Return the fault as Rekindle would detect it now."""
        row = self.strike.row
        if self.missed:
            text = f"no agent joined for node {self.node} in time"
            return Fault(kind=FaultKind.SCHEDULING, message=text, finished=self.finished, at=at)
        revealed = self.again and row.becomes is not None and self.strike.cause is Cause.PLACE
        kind = row.becomes if revealed and row.becomes else row.kind
        of_node = kind in _OF_NODES
        return Fault(
            kind=kind,
            message=row.name,
            rank=-1 if of_node else self.node * per_node + self.strike.device,
            node=self.node,
            finished=self.finished,
            signature=row.name,
            at=at,
            host=host,
            device=-1 if of_node else self.strike.device,
            code=(row.code or row.name) if revealed else row.code,
            user_caused=row.user_caused or kind is FaultKind.USER_CODE,
            reset_helps=row.reset_helps and not revealed,
        )

    def answer(self, row: StrategyRow) -> None:
        """Record whether a strategy ends the fault.

        The seed of the trace fixes chance for all strategies.
        """
        if row.strategy in ENDS:  # the person who starts the job again has removed the cause
            self.again = False
            return
        cause = self.strike.cause
        helps = cause is Cause.NOTHING or (cause is Cause.PLACE and self.moved)
        if row.succeeds < 1:
            self.chance = self.chance or random.Random(self.strike.seed + self.node)
            helps = self.chance.random() < row.succeeds and helps
        self.again = not helps


class Upcoming:
    """Take the faults of a trace in their order."""

    def __init__(self, strikes: Sequence[Strike], job: Job) -> None:
        self._strikes, self._next = strikes, 0
        self._job = job
        self._second: Strike | None = None

    def next_at(self) -> float:
        """Return when the next fault of the trace hits a place in use."""
        while self._next < len(self._strikes):
            if self._job.hit(self._strikes[self._next]):
                return self._strikes[self._next].at
            self._next += 1
        return math.inf

    def take(self) -> Strike:
        """Take the fault whose time `next_at` returned."""
        self._next += 1
        return self._strikes[self._next - 1]

    def take_before(self, until: float) -> Strike | None:
        """Take the next fault before a moment; this may be the second fault of an incident."""
        at = self.next_at()
        second = self._second
        if second is not None and second.at <= at:
            self._second = None
            if second.at < until and self._job.hit(second):
                return second
        return self.take() if at < until else None

    def expect(self, second: Strike | None, at: float) -> None:
        """Set the second fault for the current recovery; None: there is no second fault."""
        self._second = second and msgspec.structs.replace(second, at=at)

    def pass_over(self, until: float) -> None:
        """Skip the faults before a moment."""
        while self.next_at() < until:
            self._next += 1


class Repair(msgspec.Struct):
    """Hold the current recovery.

    `until` is the expected time at which all ranks train again. `spent` holds the causes of the
    time up to then. No generation exists before `formed_at`. `awaited` holds the arrival time of
    each requested node, by place. `back` is the source of the state. `anew` means that all ranks
    restart. `ended` means that a person starts the job again.
    """

    until: float
    spent: list[tuple[Loss, float]] = []
    formed_at: float = 0.0
    awaited: dict[int, float] = {}
    back: Source = Source.LIVE
    roll_back: bool = False
    anew: bool = False
    ended: bool = False
    heaviest: Strategy = LADDER[0]

    def nodes_at(self, now: float) -> float:
        """Return when all nodes have arrived, and drop those that have arrived by `now`."""
        self.awaited = {place: at for place, at in self.awaited.items() if at > now}
        return max(self.awaited.values(), default=now)

    def lengthen(self, at: float, *spans: tuple[Loss, float]) -> None:
        """Extend the recovery so that it covers these consecutive spans, which start at `at`."""
        for loss, seconds in spans:
            at += seconds
            if at > self.until:
                self.spent.append((loss, at - self.until))
                self.until = at


def replay(setting: Setting, strikes: Sequence[Strike], seconds: float) -> Outcome:
    """Run a job for this number of seconds through these faults, the earliest first."""
    return _Replay(setting, strikes, seconds).run()


class _Replay:
    def __init__(self, setting: Setting, strikes: Sequence[Strike], seconds: float) -> None:
        self._setting = setting
        self._budgets = RecoveryBudgets(setting.policy)
        self._job = Job(setting, seconds)
        self._upcoming = Upcoming(strikes, self._job)
        self._incident = 0
        self._outcome = Outcome(seconds=seconds)

    def run(self) -> Outcome:
        job = self._job
        while True:
            at = self._upcoming.next_at()
            job.train(min(at, job.grows_at))
            if job.is_over:
                break
            if job.grows_at <= at:
                job.grow()
            else:
                self._get_over(self._upcoming.take())
        self._outcome.work = job.progress.work
        self._outcome.lost = job.lost
        return self._outcome

    def _get_over(self, strike: Strike) -> None:
        """Recover until no fault recurs; other faults may occur during the recovery."""
        job = self._job
        self._incident += 1
        repair = Repair(until=job.now)
        broken = self._break(strike)
        self._answer(broken, repair)
        begun = job.now
        if strike.second is not None:
            part, second = strike.second
            self._upcoming.expect(second, job.now + part * (repair.until - job.now))
        while True:
            until = min(repair.until, job.end)
            nested = None if repair.ended else self._upcoming.take_before(until)
            if nested is not None:
                job.now = max(job.now, nested.at)
                also = self._break(nested)
                broken += also
                self._answer(also, repair)
                continue
            job.now = begun
            lost = self._restore(repair)
            due = [one for one in broken if one.again]
            if not due or repair.ended or job.is_over:
                break
            if any(one.strike.cause is Cause.SCRIPT for one in due):
                job.train(job.now + lost)  # training reaches the failing point of the script
            begun = repair.until = job.now
            self._answer(due, repair)
        self._close(repair)

    def _break(self, strike: Strike) -> list[Broken]:
        step = self._job.progress.step
        return [Broken(strike=strike, node=n, finished=step) for n in self._job.hit(strike)]

    def _answer(self, due: list[Broken], repair: Repair) -> None:
        """Decide about each fault, and carry the decision out."""
        pool = self._job.pool
        before = pool.lost
        gone = [one for one in due if one.is_gone]
        if len(gone) + len(self._job.missing) >= self._setting.world.nodes:
            repair.back = Source.STORE  # no remaining rank has any state
        for one in due:
            self._decide(one, repair, sum(other.is_gone for other in gone))
            if repair.ended:
                break
        if pool.lost > before:
            self._outcome.needed.append(pool.out(self._job.now))
            if len(due) == 1:
                self._outcome.alone.append(pool.out(self._job.now, alone=True))

    def _decide(self, one: Broken, repair: Repair, lost: int) -> None:
        """Decide about one fault. lost: the number of missing nodes without a decision yet."""
        setting, job = self._setting, self._job
        repair.nodes_at(job.now)
        per_node = setting.world.per_node
        fault = one.fault(at=job.now, host=job.host(one.node), per_node=per_node)
        decision = self._budgets.decide(
            Situation(
                fault=fault,
                session=setting.costs.job.session,
                formed=job.now >= repair.formed_at,
                newest=job.newest,
                resumed=job.resumed,
                older=job.progress.older(job.resumed) > 0,
                spares=job.pool.free(job.now),
                left=self._left(lost + len(repair.awaited)),
                engine=setting.world.engine,
                final_step=job.progress.snapshot_step(),
                alone=setting.world.nodes - len(job.missing) == 1,
                incident=self._incident,
                past=tuple(self._budgets.past),
            )
        )
        strategy, people = decision.strategy, 0.0
        if decision.approval:
            strategy, people = self._ask(strategy)
        detect = setting.costs.kinds[fault.kind].detect_s
        repair.lengthen(job.now, (Loss.RECOVERING, detect), (Loss.PEOPLE, people))
        repair.roll_back |= decision.roll_back
        one.missed = False
        self._carry_out(one, strategy, repair, detect + people)

    def _left(self, lost: int) -> int:
        """Return the size of the smaller world that may continue, or 0."""
        world = self._setting.world
        left = world.nodes - len(self._job.missing) - lost
        return left if world.least_nodes and world.least_nodes <= left < world.nodes else 0

    def _ask(self, strategy: Strategy) -> tuple[Strategy, float]:
        """Wait for a person's approval; without an answer in time the job ends."""
        policy, answer_s = self._setting.policy, self._setting.costs.job.answer_s
        if answer_s <= policy.approval_timeout_s:
            return strategy, answer_s
        snapshot = self._job.progress.snapshot_step()
        can_dump = snapshot is not None and Strategy.DUMP in policy.strategies
        return Strategy.DUMP if can_dump else Strategy.FAIL, policy.approval_timeout_s

    def _carry_out(self, one: Broken, strategy: Strategy, repair: Repair, after: float) -> None:
        """Apply the costs of a decision; its work starts `after` seconds from now."""
        setting, job = self._setting, self._job
        row = setting.costs.strategies[strategy]
        if one.is_gone or (row.moves and one.needs_to_move(strategy)):
            self._move(one, strategy, repair)
        one.answer(row)
        begins = job.now + after
        nodes = self._wait_for_nodes(one, strategy, repair, begins)
        seconds = row.seconds_at(setting.world.devices)
        if strategy in ENDS:
            spans = ((Loss.PEOPLE, seconds), (Loss.NODES, max(nodes - seconds, 0.0)))
        else:
            spans = ((Loss.NODES, nodes), (Loss.RECOVERING, seconds))
        repair.lengthen(begins, *spans)
        repair.ended |= strategy in ENDS
        repair.back = max(repair.back, row.state, key=_AGE.__getitem__)
        repair.heaviest = max(repair.heaviest, strategy, key=_WEIGHT.__getitem__)
        if strategy not in INNER:
            repair.anew, repair.formed_at = True, repair.until
        self._outcome.decisions[strategy] += 1

    def _move(self, one: Broken, strategy: Strategy, repair: Repair) -> None:
        """Give the place to another node, or continue without a node."""
        row = one.strike.row
        repair_s = row.repair_s
        if repair_s is None:
            repair_s = self._setting.costs.kinds[row.kind].repair_s
        one.moved, alone = True, len(one.strike.nodes) == 1
        if strategy is Strategy.SHRINK:
            self._job.leave_out(one.node, repair_s, alone=alone)
            return
        repair.awaited[one.node] = self._job.move(one.node, repair_s, alone=alone)

    def _wait_for_nodes(
        self, one: Broken, strategy: Strategy, repair: Repair, begins: float
    ) -> float:
        """Return how long the job waits for nodes. The world may continue without late nodes."""
        policy, inner = self._setting.policy, strategy in INNER
        seconds = repair.nodes_at(begins) - begins
        allowed = not inner or Strategy.SHRINK in policy.strategies
        smaller = allowed and self._left(len(repair.awaited)) > 0
        limit = LATE_S if smaller and not inner else policy.node_timeout_s
        if seconds <= limit:
            return seconds
        if smaller:
            for place, at in repair.awaited.items():
                self._job.do_without(place, at)
            repair.awaited = {}
        elif strategy in ENDS:
            return seconds  # a person starts the job again when the nodes have arrived
        else:
            one.missed = one.again = True
        return limit

    def _restore(self, repair: Repair) -> float:
        """End the repair and continue from the state that it found; return the work lost."""
        job = self._job
        job.wait(repair.until, repair.spent)
        repair.spent = []
        self._outcome.to_store += repair.back is Source.STORE or repair.roll_back
        lost = job.fall_back(repair.back, before=job.resumed if repair.roll_back else None)
        if repair.anew:
            job.resumed = job.progress.step
        repair.back, repair.anew, repair.roll_back = Source.LIVE, False, False
        return lost

    def _close(self, repair: Repair) -> None:
        """End the incident; training continues, or the simulated time has ended."""
        job = self._job
        self._upcoming.expect(None, job.now)
        self._outcome.incidents[repair.heaviest] += 1
        if repair.ended:
            self._outcome.ended += 1
            self._budgets.begin_anew()
            # these faults could not hit anything, because the job did not run
            self._upcoming.pass_over(job.now)
            return
        oldest = job.progress.step_of(job.progress.checkpoints - 2)
        self._budgets.forget(now=job.now, newest=job.newest, oldest=oldest)
