"""Slow ranks, and the switch of the light profiling that finds them.

While light profiling is on, agents send the times of their ranks' steps (`StepTimings`). If the
policy does more than warn, the machine checks suspect nodes together with reference nodes, while
all ranks wait between two steps. It replaces only the nodes that fail the check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rekindle.coordinator.machine.fleet import Fleet
from rekindle.coordinator.machine.generations import Generations
from rekindle.coordinator.machine.job_state import ENDING, JobState, Phase, Proceed
from rekindle.coordinator.machine.node_check_run import CheckedAgent, NodeCheckRun
from rekindle.coordinator.machine.recovery import Recovery
from rekindle.errors import UsageError
from rekindle.profiling.detector import OnlineDetector
from rekindle.profiling.findings import Finding, Slow, in_words, nodes_of
from rekindle.profiling.switch import ProfilingOrder, Switch, switched
from rekindle.protocol import agent as p
from rekindle.recovery.faults.fault import Fault, FaultKind
from rekindle.recovery.faults.stragglers import BY_TRACE, Examined, Profiled, Slowed, SlowOver
from rekindle.recovery.node_check.verdicts import SICK, Health, NodeVerdict
from rekindle.recovery.policy.decide import decide
from rekindle.recovery.policy.plan import Plan
from rekindle.recovery.policy.policy import Stragglers, Strategy

REFERENCE_NODES = 2  # nodes that are checked with slow nodes; a single one may be slow itself
MOST_EXAMS = 3  # checks of one host; after that, its slowness has another cause


class ProfilingSwitch:
    """The switch of light profiling. A user and MindCluster's switch give orders to it.

    The last order holds. traced: the last position of MindCluster's switch.
    """

    def __init__(self, job: JobState, fleet: Fleet, traced: Switch) -> None:
        self._job = job
        self._fleet = fleet
        self.traced = traced

    @property
    def profile(self) -> p.Profile:
        """Return the profiling settings of the ranks."""
        return self._fleet.settings.profile

    def switch(self, order: ProfilingOrder, now: float) -> str:
        """Switch light profiling. Return why this is impossible, or an empty text."""
        if self._job.phase in ENDING:
            return "the job is ending"
        try:
            switch = switched(self.profile.switch, order.kinds, on=order.on)
        except UsageError as error:
            return str(error)
        if switch != self.profile.switch:
            self._switch(switch, order.by, now)
        return ""

    def on_switch_read(self, message: p.ProfilingSwitchRead, now: float) -> None:
        """Handle the position of MindCluster's switch, which an agent sends.

        Every agent sends the position, also an agent that replaces a lost one. Therefore an
        unchanged position does not undo a user's later order. The journal gets each new position,
        also if it changes nothing: otherwise the next coordinator would treat it as new.
        """
        if message.switch != self.traced and self._job.phase not in ENDING:
            self.traced = message.switch
            self._switch(message.switch, BY_TRACE, now)

    def _switch(self, switch: Switch, by: str, now: float) -> None:
        changed, since = switch != self.profile.switch, self.profile.since or int(now)
        self._job.record(Profiled(switch=switch, since=since, by=by))
        if changed:
            self._fleet.change_settings(profile=p.Profile(switch=switch, since=since))


class StragglerCheck:
    """Checks a slow node before the machine reacts. Uneven work does not lead to a check.

    suspects: nodes to be checked as soon as all ranks wait. examining: those under check now.
    """

    def __init__(
        self, job: JobState, generations: Generations, recovery: Recovery, proceed: Proceed
    ) -> None:
        self._job = job
        self._generations = generations
        self._recovery = recovery
        self._proceed = proceed
        self._roster = job.roster
        self._spec = job.spec
        self._pace: OnlineDetector | None = None
        self._plan: Plan | None = None  # the plan of the generation whose ranks it compares
        self._placed: Mapping[int, int] = {}  # the compared nodes, and their agents' pids
        self.suspects: Mapping[int, Finding] = {}
        self.examining: Mapping[int, Finding] = {}
        self.checked: Mapping[int, int] = {}  # the nodes of the newest check, by connection
        self.check = NodeCheckRun(job.spec, 0, job.do, beside_ranks=True)  # the newest
        self._exams: Counter[str] = Counter()  # number of checks of each host, by this coordinator

    def on_step_timings(self, message: p.StepTimings) -> None:
        """Handle the times of ranks' steps."""
        pace = None if self._job.phase in ENDING else self._follow(self._generations.planned)
        if pace is None:
            return
        found, over = pace.add(message.steps)
        for each in over:
            self._drop(each)
        for each in found:
            self._on_slow(each)

    @property
    def pause_cause(self) -> p.Cause | None:
        """Return why the world pauses: nodes are suspected, and the policy may replace them."""
        if not self.suspects or self._spec.policy.stragglers is not Stragglers.REPLACE:
            return None
        return p.Cause(kind="node-check", ranks=self._roster.numbers_of(sorted(self.suspects)))

    def on_paused(self, now: float) -> None:
        """Do nothing yet: the check begins when every rank waits."""

    def _on_slow(self, found: Finding) -> None:
        nodes = nodes_of(found, self._spec.processes_per_node)
        policy, then, would = self._spec.policy, "", False
        if found.may_be_sick and policy.stragglers is not Stragglers.WARN:
            then = self._obstacle(found, nodes)
            would = policy.stragglers_shadow and not then
            when = {
                Stragglers.REPLACE: "the job pauses training and checks its node",
                Stragglers.ISOLATE: "the job checks its node when all ranks wait the next time",
            }
            if not then:
                then = when[policy.stragglers]
                if not would:
                    self.suspects = {**self.suspects, **dict.fromkeys(nodes, found)}
        self._job.record(
            Slowed(finding=found, nodes=nodes, hosts=self._hosts(found), then=then, would=would)
        )

    def _drop(self, over: Finding) -> None:
        """Record that a slowness has passed. Its nodes do not need a check."""
        self._job.record(SlowOver(finding=over, hosts=self._hosts(over)))
        key = (over.kind, over.ranks)
        self.suspects = {
            node: each for node, each in self.suspects.items() if (each.kind, each.ranks) != key
        }

    def _hosts(self, found: Finding) -> tuple[str, ...]:
        nodes = self._roster.nodes
        slow = nodes_of(found, self._spec.processes_per_node)
        return tuple(nodes[node].host for node in slow if node in nodes)

    def _obstacle(self, found: Finding, nodes: tuple[int, ...]) -> str:
        """Return why the machine cannot react to slow nodes, or an empty text."""
        one_by_one = found.kind is not Slow.LINK  # each node of a slow link may be the cause
        if one_by_one and 2 * len({*nodes, *self.suspects}) > len(self._roster.members):
            return "the job does nothing, because it has too few other nodes for a comparison"
        for host in self._hosts(found):
            if self._exams[host] >= MOST_EXAMS:
                return (
                    f"the job does nothing, because {self._exams[host]} checks did not find that "
                    f"{host} is slow"
                )
        for node in nodes:
            why_not = self._irreplaceable(self._fault_at(node, found, FaultKind.STRAGGLER, ""))
            if why_not:
                return f"the job does nothing, because {why_not}"
        return ""

    def _irreplaceable(self, fault: Fault) -> str:
        """Return why a node cannot be replaced while the others wait, or an empty text.

        A slow or unhealthy node does not justify a heavier strategy.
        """
        decision = decide(self._spec.policy, self._recovery.situation(fault))
        return "" if decision.strategy in (Strategy.RECOVER, Strategy.SHRINK) else decision.reason

    def _follow(self, plan: Plan | None) -> OnlineDetector | None:
        """Return the detector. It compares the ranks of the newest generation, which has this plan.

        The first times of a generation change the detector, so a job without light profiling does
        not have one. None: no generation is formed, or it ended before its first times; then its
        nodes may have changed.
        """
        if plan is self._plan:
            return self._pace
        if plan is None or self._job.phase not in (Phase.RESTORING, Phase.TRAINING):
            return None
        placed = {node.node: node.pid for node in self._roster.members}
        ranks = [rank.rank for rank in self._roster.world]
        if self._pace is None:
            per_node = self._spec.processes_per_node
            self._pace = OnlineDetector(ranks, per_node=per_node, peers=self._peers())
        elif placed != self._placed:  # the usual times of earlier nodes do not apply
            new = [node for node, pid in placed.items() if self._placed.get(node) != pid]
            others = [rank.rank for node in new for rank in self._roster.ranks_of(node)]
            self._pace.change(ranks, others)
        self._plan, self._placed = plan, placed
        self._pace.go_back(plan.step)
        return self._pace

    def _peers(self) -> list[list[int]]:
        """Return the ranks of each shard of the state, which do the same work; empty: unknown.

        If no two ranks have the same shard, as with FSDP, all are compared with each other.
        """
        owners = list(self._roster.owners().values())
        return owners if len(owners) > 1 and min(map(len, owners)) > 1 else []

    # ---- while all ranks wait

    def work_in_pause(self) -> bool:
        """Check the suspects while every rank waits. Return whether the check is not over."""
        return bool(self.examining) or (bool(self.suspects) and self._begin_check())

    def _begin_check(self) -> bool:
        """Check the suspects with reference nodes. Return False if that is impossible now."""
        here = [node.node for node in self._roster.members]
        self.examining = {n: found for n, found in self.suspects.items() if n in here}
        self.suspects = {}
        others = [node for node in here if node not in self.examining]
        if not self.examining or len(here) == 1:
            self.examining = {}
            return False
        self._check([*self.examining, *others[:REFERENCE_NODES]])
        return True

    def _check(self, nodes: Sequence[int]) -> None:
        """Check nodes together while their ranks wait and keep their device memory."""
        agents = [self._roster.nodes[node] for node in nodes]
        self.checked = {agent.connection: agent.node for agent in agents}
        self.check = NodeCheckRun(self._spec, len(agents), self._job.do, beside_ranks=True)
        for agent in agents:
            self.check.add(
                CheckedAgent(
                    connection=agent.connection,
                    node=agent.node,
                    host=agent.host,
                    address=agent.address,
                )
            )

    def on_check_news(self, node: int, message: p.Checked | p.CheckReady, now: float) -> None:
        """Handle an agent's answer. Answers after the check have no effect."""
        connection = self._roster.nodes[node].connection
        if self.check.knows(connection):
            self.check.on_message(connection, message)
            self.end_check(now)

    def on_gathering_over(self, now: float) -> None:
        """Begin the check after the time limit for further agents."""
        self.check.on_gathering_over()
        self.end_check(now)

    def on_answers_late(self, now: float) -> None:
        """Continue the check after the time limit for answers."""
        self.check.on_answers_late()
        self.end_check(now)

    def end_check(self, now: float) -> None:
        """Take the verdicts, if every agent that still exists has one."""
        if self.examining and not self.check.is_busy:
            judged = self.check.take_judged()
            self.on_examined({self.checked[e.connection]: e.verdict for e in judged}, now)

    def on_examined(self, verdicts: Mapping[int, NodeVerdict], now: float) -> None:
        """Handle the verdicts about nodes. A lost node does not have one."""
        suspects, self.examining = self.examining, {}
        for node, verdict in sorted(verdicts.items()):
            agent = self._roster.nodes.get(node)
            if agent is None:
                continue
            suspect = node in suspects
            self._job.record(Examined(node=node, host=agent.host, suspect=suspect, verdict=verdict))
            self._exams[agent.host] += suspect
            if verdict.health in SICK and self._job.phase is Phase.REGROUPING:
                self._on_sick(node, suspects.get(node), verdict, now)
        self._proceed()

    def _on_sick(self, node: int, found: Finding | None, verdict: NodeVerdict, now: float) -> None:
        kind = FaultKind.STRAGGLER if verdict.health is Health.STRAGGLER else FaultKind.NODE
        fault = self._fault_at(node, found, kind, verdict.reason, now)
        if why_not := self._irreplaceable(fault):
            self._recovery.isolate(
                node, f"{fault.message}; the job keeps the node for now, because {why_not}"
            )
        else:
            self._recovery.report(fault)

    def _fault_at(
        self, node: int, found: Finding | None, kind: FaultKind, reason: str, now: float = 0.0
    ) -> Fault:
        description = in_words(found, (node,)) if found else f"node {node}"
        agent = self._roster.nodes.get(node)
        return Fault(
            kind=kind,
            message=f"{description}; node check: {reason}",
            node=node,
            host=agent.host if agent else "",
            at=now,
            signature=kind.value,
        )
