"""A Session in worlds of changing sizes: 4 ranks, 2 of them, and 4 again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Rank, run
from ranks.agent import Agent
from torch import nn
from waiting import wait_until

from rekindle import names
from rekindle.protocol.agent import (
    Arrived,
    BufferRequest,
    FormGeneration,
    Settings,
    StateReady,
    StepDone,
    StepFailed,
)
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.profiler import Profiler
from rekindle.rank.progress import RankPlace, Records
from rekindle.rank.snapshot_schedule import SnapshotSchedule
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.training.torch import Session, StepSampler

FULL, BATCH, LENGTH, STEPS = 4, 5, 200, 6
SHRINK, GROW = 2, 4  # steps finished when the world size changes
STAY = (3, 2)  # the slots that stay throughout, in the order of their ranks in the small world
SEED = 9
INPUTS = torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(0))


def form(port: int, generation: int, slots: tuple[int, ...], **settings: Any) -> FormGeneration:
    """Return a generation of these slots, in the order of their ranks."""
    return FormGeneration(
        generation=generation,
        world_size=len(slots),
        store_host="127.0.0.1",
        store_port=port,
        ranks={slot: rank for rank, slot in enumerate(slots)},
        **settings,
    )


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Dropout(0.2), nn.Linear(40, 1))


@dataclass
class Life:
    """The part of one process in a run: its start values and its records of each step."""

    rank: Rank
    keep: bool
    elastic: bool
    seen: list[dict[str, Any]]

    def forms(self) -> list[FormGeneration]:
        """Return the agent's orders by a coordinator's plan."""
        slot, port, full = self.rank.rank, self.rank.store.port, tuple(range(FULL))
        stays = {slot: RankPlan(source=StateSource.SELF)}
        first = form(port, 1, full, step=0, plan={slot: RankPlan(source=StateSource.FRESH)})
        if not self.elastic:
            return [first]
        # Ranks 0 and 1 of the last world are new and get their state from ranks 2 and 3.
        if slot in STAY:
            sends = RankPlan(source=StateSource.SELF, sends_to=(slot - 2,))
            last = form(port, 3, full, step=GROW, plan={slot: sends})
            return [first, form(port, 2, STAY, step=SHRINK, plan=stays), last]
        takes = RankPlan(source=StateSource.PEER, peer=slot + 2)
        return [first, form(port, 3, full, step=GROW, plan={slot: takes})]

    def train(self, agent: Agent, *, seed: int) -> list[torch.Tensor]:
        """Train; at a change of the world size a slot that does not stay ends."""
        slot, model = self.rank.rank, model_of(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session = Session(
            model=model,
            optimizer=optimizer,
            sampler=StepSampler(LENGTH, BATCH, seed=3),
            ddp={"bucket_cap_mb": 0.001},
            seed=SEED,
            keep_global_batch=self.keep,
            ignore=["self.seen", "agent"],
        )
        with session:
            for step in session.steps(STEPS):
                with step:
                    self.one_step(session, optimizer, step)
                if self.elastic and step.number + 1 in (SHRINK, GROW):
                    self.meet(session.generation, session.world_size)
                    if step.number + 1 == SHRINK and slot not in STAY:
                        break
                    agent.over(session.generation)
                    wait_until(lambda: session._loop.member.is_over, "the end of a generation")
        state = optimizer.state_dict()["state"].values()
        return [*model.parameters(), *(value for each in state for value in each.values())]

    def one_step(self, session: Session, optimizer: Any, step: Any) -> None:
        samples = []
        optimizer.zero_grad()
        for part in step.parts():
            (session.model(INPUTS[part.indices]).square().mean() * part.weight).backward()
            samples += part.indices
        optimizer.step()
        place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "GROUP_RANK")]
        self.seen.append(
            {
                "step": step.number,
                "slot": session.slot,
                "rank": session.rank,
                "world_size": session.world_size,
                "environment": [int(value) for value in place],
                "samples": samples,
            }
        )

    def meet(self, generation: int, count: int) -> None:
        """Wait until all ranks have finished the step.

        A rank that leaves closes its peers' sockets.
        """
        key = f"{self.keep}-{generation}-done"
        self.rank.store.add(key, 1)
        wait_until(lambda: self.rank.store.add(key, 0) == count, "all ranks")


def _lives(rank: Rank, keep: bool, elastic: bool) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the records and the state of a slot, from one process or from two in succession.

    The second process simulates the return of a lost node.
    """
    slot = rank.rank
    os.environ |= {
        "RANK": str(slot),
        "ROLE_RANK": str(slot),
        "GROUP_RANK": str(slot // 2),
        "LOCAL_RANK": str(slot % 2),
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": str(FULL),
        names.ENV_SLOT: str(slot),
        names.ENV_FULL_WORLD: str(FULL),
        names.ENV_SNAPSHOT_EVERY: "1",
    }
    life = Life(rank, keep, elastic, [])
    forms = life.forms()
    lives = [forms] if slot in STAY or not elastic else [forms[:1], forms[1:]]
    for seed, each in enumerate(lives):
        agent = Agent(each)
        state = life.train(agent, seed=seed)
        named = [m.rank for m in agent.received if isinstance(m, Arrived | StateReady | StepDone)]
        assert set(named) == {slot}
        done = [m.generation for m in agent.received if isinstance(m, StepDone)]
        assert done == [f.generation for f in each]
        rooms = [m.rank for m in agent.received if isinstance(m, BufferRequest)]
        # The first slot of a node requests buffers, and after a refusal again for the last step's
        # state.
        assert rooms in (([slot], [slot] * 2) if slot % 2 == 0 else ([],))
    return life.seen, [value.detach().numpy().tobytes() for value in state]


@pytest.fixture(scope="module", params=[False, True], ids=["shrinks", "kept"])
def runs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the same training in one world and in three worlds, by slot."""
    keep = request.param
    return {
        "keep": keep,
        "whole": run(_lives, FULL, keep, False),
        "elastic": run(_lives, FULL, keep, True),
    }


def in_step(results: list[Any], step: int) -> list[dict[str, Any]]:
    """Return the ranks' records of a step, in the order of their ranks."""
    seen = [one for seen, _ in results for one in seen if one["step"] == step]
    return sorted(seen, key=lambda one: one["rank"])


def test_a_rank_knows_its_place_in_each_world(runs: dict[str, Any]) -> None:
    """rank, world_size and the environment follow the world; the slot stays the same."""
    for step in range(STEPS):
        slots = STAY if SHRINK <= step < GROW else tuple(range(FULL))
        seen = in_step(runs["elastic"], step)
        assert [one["slot"] for one in seen] == list(slots)
        assert [one["rank"] for one in seen] == list(range(len(slots)))
        for one in seen:
            rank, size = one["rank"], len(slots)
            assert one["world_size"] == size
            assert one["environment"] == [rank, size, rank, rank // 2]


def test_the_global_batch_is_what_the_user_chose(runs: dict[str, Any]) -> None:
    """With keep_global_batch the steps take the samples of the full world.

    Otherwise a smaller world takes fewer samples, the next ones of the stream.
    """
    taken = [
        [{i for one in in_step(runs[name], step) for i in one["samples"]} for step in range(STEPS)]
        for name in ("elastic", "whole")
    ]
    if runs["keep"]:
        assert taken[0] == taken[1]
    sizes = [len(samples) for samples in taken[0]]
    small = FULL if runs["keep"] else len(STAY)
    assert sizes == [BATCH * n for n in (FULL, FULL, small, small, FULL, FULL)]
    sampler = StepSampler(LENGTH, sum(sizes[:3]), seed=3)  # within the first epoch
    sampler.bind(0, 1)
    assert set(sampler.indices()) == set.union(*taken[0][:3])


def test_all_ranks_end_with_the_same_state(runs: dict[str, Any]) -> None:
    """All ranks end with the same bits: those that stayed and those that returned."""
    for name in ("whole", "elastic"):
        states = [state for _, state in runs[name]]
        assert all(state == states[0] for state in states)


def test_a_kept_batch_trains_what_the_full_world_trains(runs: dict[str, Any]) -> None:
    """With keep_global_batch the final parameters are those of the full world, within rounding."""
    ours, wanted = (
        [torch.frombuffer(bytearray(one), dtype=torch.float32) for one in runs[name][0][1]]
        for name in ("elastic", "whole")
    )
    close = all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, wanted, strict=True)
    )
    assert close == runs["keep"]


def _hiccups_between_parts(rank: Rank) -> list[list[Any]]:
    """Return the states after three steps, without a fault and with one between two parts."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", names.ENV_FULL_WORLD: "3"}
    states = []
    for first, hiccups in ((1, ()), (2, (1,))):
        own = RankPlan(source=StateSource.FRESH), RankPlan(source=StateSource.SELF)
        begin = form(rank.store.port, first, (0,), step=0, plan={0: own[0]})
        again = form(rank.store.port, first + 1, (0,), step=1, plan={0: own[1]})
        agent, due, model = Agent([begin, again][: 1 + len(hiccups)]), list(hiccups), model_of(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = StepSampler(LENGTH, BATCH)
        with Session(
            model=model,
            optimizer=optimizer,
            sampler=sampler,
            ddp=True,
            keep_global_batch=True,
            transient=(TimeoutError,),
        ) as session:
            for step in session.steps(3):
                with step:
                    for number, part in enumerate(step.parts()):
                        loss = session.model(INPUTS[part.indices]).square().mean()
                        (loss * part.weight).backward()
                        if number == 1 and step.number in due:
                            due.remove(step.number)
                            raise TimeoutError("a data source hiccups")
                    optimizer.step()
                    optimizer.zero_grad()
        assert len([m for m in agent.received if isinstance(m, StepFailed)]) == len(hiccups)
        states.append([sampler.position, *(p.tolist() for p in model.parameters())])
    return states


def test_a_step_that_broke_between_its_parts_is_done_again() -> None:
    """A repeated step does not include the gradients of parts from before the fault."""
    ((undisturbed, disturbed),) = run(_hiccups_between_parts, 1)
    assert undisturbed == disturbed
    assert undisturbed[0] == 3 * 3 * BATCH


def test_whoever_writes_has_checkpoints_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the writing rank of a generation requests the write of a checkpoint.

    A rank that no longer writes does not request a checkpoint that it missed.
    """
    taken: list[tuple[int, bool]] = []
    free = True

    class Writer:
        def __init__(self, channel: object, place: RankPlace) -> None:
            assert place.slot == 2

        def take(self, named: object, *, step: int, checkpoint: bool, **_: object) -> bool:
            taken.append((step, checkpoint))
            return free

    monkeypatch.setenv(names.ENV_SNAPSHOT_EVERY, "2")
    channel = SimpleNamespace(settings=Settings(checkpoint_every=4))
    schedule = SnapshotSchedule(channel, RankPlace(2), Profiler(2, 0), Writer)
    writes, idle = {8, 9, 12, 15}, []
    for step in (4, 8, 9, 12, 13, 14, 15, 20):
        free = step != 12
        place = RankPlace(2, writes=step in writes)
        if schedule.is_idle(step, 4, last=step == 20):
            idle.append(step)
        schedule.keep({}, place=place, step=step, last=step == 20, position={}, metrics={})
    assert idle == [9, 15]  # a checkpoint is missing after step 13
    assert taken == [(4, False), (8, True), (12, True), (14, False), (20, False)]


def test_records_are_the_slots(tmp_path: Any) -> None:
    """A step record has the rank's slot, which is its number in the full world."""
    records = Records(tmp_path / "records", HeartbeatPage(), 3)
    records.write(0, 1, {})
    records.close()
    assert '"rank":3' in (tmp_path / "records").read_text()
