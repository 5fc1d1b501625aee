"""No rank loads snapshots and checkpoints that are damaged while a job runs.

The test then kills all ranks or all nodes, so that their states must come from storage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs.baselines import Baselines
from training_jobs.ended import Ended, EndedOf
from training_jobs.job import Job
from training_jobs.memory import damage_snapshots
from training_jobs.plans import Attempt, Plan, Row, each_row
from training_jobs.rows import paused

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal

RANKS, NODES, STEPS = 2, 2, 180
STATE = "state-00000.safetensors"
SOURCES = {"snapshot", "checkpoint", "fresh"}  # without peers, and the rank itself


def flip_newest(run: Job) -> None:
    """Change a byte of the newest checkpoint."""
    path = run.checkpoints()[0] / STATE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def lost(
    name: str,
    step: int,
    damage: Callable[[Job], None],
    *,
    back_to: int,
    newest: int = 0,
    checkpoint: int = 0,
    nodes: bool = False,
    source: str,
) -> Row:
    """Return the row: all ranks pause; then damage, and a kill of all ranks or all nodes.

    Training continues from step `back_to`. `newest` is the step of the state that is tried first,
    if it differs. With `checkpoint`, the damage waits until the checkpoint of that step is written.
    `source` is the origin of the state. A rank that could read a snapshot keeps it as its own.
    """

    def act(run: Job) -> None:
        if checkpoint:
            run.wait(lambda: _has(run, checkpoint), f"checkpoint {checkpoint}")
        damage(run)
        if nodes:
            run.kill_node(*range(NODES))
        else:
            run.kill(*range(RANKS))

    def check(ended: Ended, incident: journal.Incident) -> None:
        formed = ended.of(journal.Formed)
        own = [(e.step, e.sources) for e in formed if e.incident == incident.number]
        assert own[0][0] == (newest or back_to), own
        assert own == sorted(own, key=lambda each: -each[0]), own
        step, sources = own[-1]
        assert step == back_to, own
        assert {*sources} & SOURCES <= {source}, own
        assert source in sources or source == "snapshot", own

    return paused(
        name,
        step,
        act,
        ranks=RANKS,
        strategies=None,
        lost=step - back_to,
        resumed=back_to,
        replaced=range(RANKS),
        check=check,
    )


def _has(run: Job, step: int) -> bool:
    """Return whether the newest checkpoint is complete and has this step."""
    newest = run.checkpoints()[:1]
    return bool(newest) and int(newest[0].name[5:15]) == step and _is_whole(newest[0])


def _is_whole(checkpoint: Path) -> bool:
    return (checkpoint / "manifest.json").exists()


def damage(run: Job, *nodes: int, step: int | None = None) -> None:
    """Damage the snapshots (of a step) of these nodes' agents."""
    for node in nodes:
        assert damage_snapshots(run.agent_pid(node), step)


def damage_all(run: Job) -> None:
    """Damage all snapshots and the newest checkpoint."""
    damage(run, 0, 1)
    flip_newest(run)


ROWS = (
    lost(
        "all snapshots, without a checkpoint",
        8,
        lambda run: damage(run, 0, 1),
        newest=6,
        back_to=0,
        source="fresh",
    ),
    lost(
        "the snapshot of one node",
        14,
        lambda run: damage(run, 0),
        back_to=12,
        source="snapshot",
    ),
    lost(
        "the newest snapshot of each node",
        20,
        lambda run: damage(run, 0, 1, step=18),
        newest=18,
        back_to=12,
        source="snapshot",
    ),
    lost(
        "all snapshots",
        45,
        lambda run: damage(run, 0, 1),
        checkpoint=40,
        newest=42,
        back_to=40,
        source="checkpoint",
    ),
    lost(
        "all snapshots and the newest checkpoint",
        85,
        damage_all,
        checkpoint=80,
        newest=84,
        back_to=40,
        source="checkpoint",
    ),
    lost(
        "the newest checkpoint, before all nodes are lost",
        125,
        flip_newest,
        checkpoint=120,
        nodes=True,
        back_to=80,
        source="checkpoint",
    ),
)
PLAN = Plan(
    "damaged",
    (Attempt(ROWS),),
    ranks=RANKS,
    steps=STEPS,
    settings={"nodes": NODES, "snapshot_every": 6, "checkpoint_every": 40},
)


@pytest.mark.parametrize(("plan", "row"), each_row(PLAN))
def test_the_newest_valid_state_is_used(ended_of: EndedOf, plan: Plan, row: Row) -> None:
    ended_of(plan).check(row)


def test_the_node_that_cannot_restore_is_named(ended_of: EndedOf) -> None:
    """If a node's snapshot is damaged, the incident names that node; another node's is used."""
    ended = ended_of(PLAN)
    faults = [fault for incident in ended.incidents_of(ROWS[1]) for fault in incident.faults]
    assert (FaultKind.RESTORE, 0) in [(fault.kind, fault.node) for fault in faults]


def test_the_training_is_that_of_an_undisturbed_run(
    ended_of: EndedOf, baseline_of: Baselines
) -> None:
    ended_of(PLAN).check_end(baseline_of("ddp", RANKS, STEPS))
