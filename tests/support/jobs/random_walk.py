"""One random walk of the coordinator's state machine, and the hash of its commands."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from jobs.checked import CheckedWorld
from jobs.settling import settle
from jobs.trained import SIGKILL
from rekindle.coordinator.machine.job_state import Command, Timer
from rekindle.job.spec import Framework
from rekindle.profiling.switch import WORDS, ProfilingOrder, Switch
from rekindle.protocol import agent as p
from rekindle.protocol.heartbeat_page import RankActivity
from rekindle.protocol.monitoring import Condition
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.fault import ErrorRecord, FaultKind
from rekindle.recovery.faults.tables.verdict import Severity
from rekindle.recovery.policy.policy import LADDER, Policy, Stragglers, Strategy

MOVES = 400  # the maximum, before the walk lets the job end
DIGITS = 16  # hexadecimal digits of the sha256 of a walk
_ASKED = (Strategy.RECOVER_IN_PLACE, Strategy.RESTART)
_TIMERS = [timer.value for timer in Timer]  # in this order, so that a new name changes no walk

Pairs = Counter[tuple[str, str]]


def encode(command: Command) -> bytes:
    """Return a command as bytes: its type and its fields in order, without sentences."""
    if hasattr(command, "message"):
        parts = [command.connection, type(command.message).__name__, command.message]
    elif hasattr(command, "event"):
        parts = [type(command.event).__name__, command.event]
    else:
        parts = [getattr(command, name) for name in command.__struct_fields__]
    plain = msgspec.to_builtins([type(command).__name__, *parts], str_keys=True)
    return msgspec.json.encode(_without_sentences(plain), order="sorted")


def _without_sentences(value: Any) -> Any:
    """Replace texts that contain a space, so that a change of wording keeps the digests."""
    if isinstance(value, dict):
        return {key: _without_sentences(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_without_sentences, value))
    return "<text>" if isinstance(value, str) and " " in value else value


class _Recorded(CheckedWorld):
    """Simulated agents and a state machine, with a hash of all commands."""

    def __init__(self, pairs: Pairs, **settings: object) -> None:
        self.digest = hashlib.sha256()
        self.pairs = pairs
        super().__init__(**settings)

    def collect(self) -> None:
        super().collect()
        for command in self.commands:
            self.digest.update(encode(command))
        self.digest.update(b"\n")

    def hello_again(self, connection: int, node: int, **changes: object) -> None:
        self.met("Hello")
        super().hello_again(connection, node, **changes)

    def say(self, node: int, message: p.Message) -> None:
        self.met(type(message).__name__)
        super().say(node, message)

    def say_before_admission(self, connection: int, message: p.Message) -> None:
        self.met(type(message).__name__)
        super().say_before_admission(connection, message)

    def met(self, event: str) -> None:
        self.pairs[event, self.phase.value] += 1


class RandomWalk:
    """A job of simulated agents and ranks, and the random moves of one seed.

    `pairs`: counts message types by the phase in which they arrived.
    """

    def __init__(self, seed: int, pairs: Pairs) -> None:
        self.chance = chance = random.Random(seed)
        self.pairs = pairs
        strategies = LADDER if chance.random() < 0.2 else Policy().strategies
        policy = Policy(
            strategies=strategies,
            max_restarts=chance.choice((0, 1, 2, 5)),
            max_recoveries=chance.choice((0, 2, 6, 40)),
            max_in_row=chance.randrange(1, 4),
            approve=(chance.choice(_ASKED),) if chance.random() < 0.2 else (),
            stragglers=chance.choice(tuple(Stragglers)),
        )
        nodes = chance.randrange(1, 4)
        framework = chance.choice((Framework.TORCH, Framework.TORCH, Framework.MINDSPORE))
        least = chance.randrange(nodes + 1)
        settings = {
            "nodes": nodes,
            "processes": chance.randrange(1, 4),
            "least": least if framework is Framework.TORCH else 0,
            "policy": policy,
            "framework": framework,
        }
        self.world = _Recorded(pairs, **settings | self._changes(policy))
        self.world.names_session = self.chance.random() < 0.5
        self.events = self._events()

    def _changes(self, policy: Policy) -> dict[str, Any]:
        """Return the settings that differ from those of a walk without node checks."""
        return {}

    def run(self) -> str:
        world = self.world
        try:
            self._run()
        except AssertionError:  # an invariant of `jobs.checks` does not hold
            world.digest.update(b"violation")
            self.pairs["violation", world.phase.value] += 1
        world.digest.update(repr(world.outcome).encode())
        return world.digest.hexdigest()[:DIGITS]

    def _run(self) -> None:
        world, chance = self.world, self.chance
        calm = chance.choice((0.7, 0.9, 0.97))
        for _ in range(MOVES):
            if world.outcome is not None:
                break
            moves = world.moves()
            if moves and chance.random() < calm:
                chance.choice(moves)()
            else:
                chance.choice(self.events)()
        settle(world)

    # ---- faults and events

    def _events(self) -> list[Callable[[], None]]:
        """Return the faults and events of a walk. Frequent ones are in the list several times."""
        return [
            *([self._break_rank] * 6),
            *([self._pass_time] * 3),
            *([self._stall] * 3),
            *([self._message] * 6),
            *([self._fail_spawn] * 2),
            self._lose_node,
            self._change_spares,
            self._answer,
            self._lose_store,
            self._lose_coordinator,
            *([self._sign] * 3),
            self._switch,
            self._stop,
        ]

    def _rank(self) -> int | None:
        ranks = sorted(self.world.processes)
        return self.chance.choice(ranks) if ranks else None

    def _node(self) -> int | None:
        """Return a node whose agent is connected, or None."""
        nodes = sorted(self.world.machine.job.roster.nodes)
        return self.chance.choice(nodes) if nodes else None

    def _break_rank(self) -> None:
        world, rank = self.world, self._rank()
        if rank is None:
            return
        match self.chance.choice(("kill", "raise", "leave", "hang", "break", "restore", "device")):
            case "kill":
                world.die(rank, signal=SIGKILL)
            case "raise":
                text = f"Error {self.chance.randrange(3)}"
                world.die(rank, code=1, error=ErrorRecord(message=text, at=world.now))
            case "leave":
                world.die(rank, code=0)
            case "hang":
                world.hang(rank)
            case "break":
                world.break_collective(rank)
            case "restore":
                world.fail_restore(rank)
            case "device":
                self._fail_step(rank)

    def _fail_step(self, rank: int) -> None:
        world, process = self.world, self.world.processes[rank]
        node = world.node_of(rank)
        if node in world.nodes and not world.agents[node].cut:
            kind = self.chance.choice(
                (FaultKind.TRANSIENT, FaultKind.DEVICE_MEMORY, FaultKind.DEVICE)
            )
            valid_steps = self.chance.choice((None, None, max(0, process.finished - 2)))
            world.fail_step(rank, generation=process.generation, kind=kind, valid_steps=valid_steps)

    def _pass_time(self) -> None:
        names = sorted(self.world.timers, key=_TIMERS.index)
        if names:
            name = self.chance.choice(names)
            self.world.met(f"timer {name}")
            self.world.fire(name)

    def _fail_spawn(self) -> None:
        """Let an agent fail to start ranks: memory is short, or a device reset fails."""
        for _, agent in sorted(self.world.agents.items()):
            if not agent.orders or agent.cut or not isinstance(agent.orders[0], p.Spawn):
                continue
            spawn = agent.orders.popleft()
            for rank in spawn.ranks:
                failed = p.DeviceResetFailed if rank in spawn.reset else p.SpawnFailed
                agent.news.append(failed(rank=rank, error="no"))
            return

    def _lose_node(self) -> None:
        agents, connected = self.world.agents, self.world.nodes
        nodes = [node for node in sorted(agents) if agents[node].cut or node in connected]
        if nodes:
            self.world.met("agent lost")
            self.world.lose(self.chance.choice(nodes))

    def _change_spares(self) -> None:
        world = self.world
        if self.chance.random() < 0.5 and len(world.spares) < 2:
            world.spare_comes()
        elif world.spares:
            world.spare_dies(self.chance.choice(sorted(world.spares)))

    def _answer(self) -> None:
        machine = self.world.machine
        granted = self.chance.random() < 0.9
        machine.recovery.approve(
            p.Approval(incident=machine.job.incidents.open, granted=granted, by="ann")
        )
        self.world.met("approval")
        self.world.collect()

    def _lose_store(self) -> None:
        store = self.world.machine.job.store
        if store.is_up and store.node in self.world.agents:
            self.world.agents[store.node].store = None
            self.world.agents[store.node].news.append(p.StoreDown(serial=store.serial))

    def _lose_coordinator(self) -> None:
        self.world.met("takeover")
        self.world.lose_coordinator()

    def _stop(self) -> None:
        if self.chance.random() < 0.1:
            self.world.met("stop")
            self.world.stop(at_once=self.chance.random() < 0.3)

    def _sign(self) -> None:
        """Report a health event of a device or a pod."""
        world, chance = self.world, self.chance
        node = chance.randrange(world.machine.job.spec.nodes)
        source, text = chance.choice(
            (
                (EventSource.XID, "48"),
                (EventSource.XID, "79"),
                (EventSource.ASCEND, "80E01801"),
                (EventSource.POD_REASON, "OOMKilled"),
                (EventSource.NODE_CONDITION, "Ready=False"),
            )
        )
        device = chance.randrange(-1, world.machine.job.spec.processes_per_node)
        event = HealthEvent(
            source=source,
            what=text,
            node=node,
            device=device if source in (EventSource.XID, EventSource.ASCEND) else -1,
            gone=chance.random() < 0.3,
            by="walk",
        )
        world.met("sign")
        world.machine.health.on_health_event(event, world.now)
        world.collect()

    def _switch(self) -> None:
        world = self.world
        world.met("profile")
        kinds = (self.chance.choice(WORDS),)
        order = ProfilingOrder(on=self.chance.random() < 0.7, kinds=kinds, by="ann")
        world.machine.switch.switch(order, world.now)
        world.collect()

    def _stall(self) -> None:
        """Let an agent report a late rank, or let agents answer an inspection of ranks."""
        world, rank = self.world, self._rank()
        inspection = world.machine.job.inspection
        if inspection is not None:
            for node in sorted(inspection.wanted & set(world.nodes)):
                world.say(node, self._inspected(node, inspection.serial))
        elif rank is not None and world.node_of(rank) in world.nodes:
            generation, stopped = world.processes[rank].generation, self.chance.random() < 0.3
            stalled = p.RankStalled(rank=rank, generation=generation, stopped=stopped)
            world.say(world.node_of(rank), stalled)

    def _inspected(self, node: int, serial: int) -> p.RanksInspected:
        chance, world = self.chance, self.world
        if chance.random() < 0.1:
            return p.RanksInspected(serial=serial, looks=(), error="cannot look")
        own = [rank for rank in sorted(world.processes) if world.node_of(rank) == node]
        looks = tuple(
            p.RankInspection(
                rank=rank,
                finished=world.processes[rank].finished,
                doing=chance.choice(tuple(RankActivity)),
                elapsed_s=chance.choice((1.0, 30.0)),
                limit_s=0.5 if chance.random() < 0.8 else 60.0,
                waiting=chance.random() < 0.6,
                operations=chance.randrange(5),
                stopped=chance.random() < 0.1,
                busy=chance.random() < 0.2,
                where=chance.choice(("", "train.py:3 step")),
            )
            for rank in own
        )
        return p.RanksInspected(serial=serial, looks=looks)

    def _message(self) -> None:
        """Send a report that does not need a simulated process."""
        node = self._node()
        if node is not None and not (node in self.world.agents and self.world.agents[node].cut):
            self.world.say(node, self._any_message(node))

    def _any_message(self, node: int) -> p.Message:
        world, chance = self.world, self.chance
        spec, machine = world.machine.job.spec, world.machine
        rank = node * spec.processes_per_node + chance.randrange(spec.processes_per_node)
        step, generation = chance.randrange(1, 7), chance.randrange(machine.job.generation + 1)
        state = (step, generation)
        other = (rank + spec.processes_per_node) % spec.world_size
        shards = chance.choice((1, 2))
        part = {"step": step, "generation": generation, "shard": 0, "shards": shards}
        error = chance.choice(("", "full"))
        made = {"step": step, "generation": generation}
        conditions = {0: Condition(Severity.CRITICAL, ("80E01801",))}
        return chance.choice(
            (
                lambda: p.Heartbeat(
                    finished={rank: step}, total=world.total, metrics={"loss": 1.0}
                ),
                lambda: p.Snapshots(kept={rank: (state,)}),
                lambda: p.Snapshots(kept={other: (state,)}, copies=True),
                lambda: p.CheckpointWritten(**made, path="there", error=error),
                lambda: p.WriteLeftOut(**made, reason="the store is slow"),
                lambda: p.SnapshotRefused(rank=rank, error="no memory"),
                lambda: p.ShardReady(**part, rank=rank),
                lambda: p.ShardWritten(**part, error=error),
                lambda: p.Pruned(removed=(state,)),
                lambda: p.Conditions(devices=conditions if chance.random() < 0.5 else {}),
                lambda: p.ProfilingSwitchRead(switch=Switch()),
                lambda: p.StepTimings(steps={}),
                lambda: p.Paused(rank=rank, generation=generation, finished=step),
                lambda: p.StepLeftOut(**made, rank=rank, reason="a gradient is not finite"),
                lambda: p.StoreUp(serial=machine.job.store.serial, port=chance.choice((0, 29500))),
            )
        )()
