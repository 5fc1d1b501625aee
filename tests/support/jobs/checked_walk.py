"""A random walk in which nodes are checked: new ones before they join, and slow ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from jobs.checked import Defect, timings
from jobs.random_walk import Pairs, RandomWalk
from rekindle.profiling.switch import Switch
from rekindle.protocol import agent as p
from rekindle.recovery.policy.policy import Policy, Stragglers


class CheckedWalk(RandomWalk):
    """A walk in which nodes are checked, and in which nodes become slow."""

    def __init__(self, seed: int, pairs: Pairs) -> None:
        super().__init__(seed, pairs)
        self._timed = (0, 0)  # a generation, and the newest step whose times were reported
        for _ in range(self.world.machine.job.spec.spares):
            self.world.spare_comes()

    def _changes(self, policy: Policy) -> dict[str, Any]:
        chance = self.chance
        stragglers = chance.choice((policy.stragglers, Stragglers.REPLACE, Stragglers.ISOLATE))
        return {
            "nodes": chance.randrange(2, 5),
            "least": 0,
            "spares": chance.randrange(2),
            "policy": msgspec.structs.replace(policy, stragglers=stragglers),
            "network_check": chance.random() < 0.8,
            "exclude_straggler": chance.random() < 0.5,
            "total": 20,
            "defect": self._defect,
            "fair": True,  # walks without node checks keep the order of their digests
        }

    def _defect(self) -> Defect:
        healthy = self.chance.random() < 0.8
        return Defect.NONE if healthy else self.chance.choice(tuple(Defect))

    def _events(self) -> list[Callable[[], None]]:
        return [*super()._events(), *([self._slow] * 8), *([self._say_before_admission] * 3)]

    def _slow(self) -> None:
        """Let all agents report step times, which become longer on one node."""
        world, machine = self.world, self.world.machine
        plan, nodes = machine.generations.planned, sorted(machine.job.roster.nodes)
        if plan is None or not nodes:
            return
        generation, last = self._timed
        first = last + 1 if generation == machine.job.generation else plan.step + 1
        slow = self.chance.choice(nodes)
        for start, work in ((first, 0.05), (first + 30, 0.075)):
            for node in nodes:
                steps = range(start, start + 30)
                if node in machine.job.roster.nodes and not world.agents[node].cut:
                    world.say(node, timings(world, node, steps, work if node == slow else 0.05))
        self._timed = machine.job.generation, first + 59

    def _lose_node(self) -> None:
        lines = sorted(self.world.candidates)
        if lines and self.chance.random() < 0.5:
            self.world.met("agent lost")
            self.world.lose_candidate(self.chance.choice(lines))
        else:
            super()._lose_node()

    def _say_before_admission(self) -> None:
        """Send a report of an agent whose node is being checked."""
        world, chance = self.world, self.chance
        if world.candidates:
            line = chance.choice(sorted(world.candidates))
            message = chance.choice(
                (*self._check_messages(), p.ProfilingSwitchRead(switch=Switch()))
            )
            world.say_before_admission(line, message)

    def _any_message(self, node: int) -> p.Message:
        if self.chance.random() < 0.7:
            return super()._any_message(node)
        return self.chance.choice(self._check_messages())

    def _check_messages(self) -> tuple[p.Message, ...]:
        serial = self.chance.randrange(1, 5)
        return (
            p.CheckpointInvalid(path="there", reason="a file is missing"),
            p.CheckReady(port=30_000),
            p.Checked(serial=serial, error=self.chance.choice(("", "reset"))),
        )
