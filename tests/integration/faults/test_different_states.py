"""Ranks that should hold the same state, and do not: no such job ends with success."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from training_jobs.job import Job

from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Policy, Replicas, Strategy

STEPS = 100
SCRIPT = """
import hashlib, os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from rekindle.training.torch import Session

habit = "HABIT"
rank = int(os.environ["RANK"])
torch.manual_seed(rank if habit == "seeds" else 0)


class Meter:
    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


meter, flipped = Meter(), False
layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)]
if habit == "pipeline":
    model = nn.Sequential(*layers[:2]) if rank == 0 else layers[2]
else:
    model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ddp = habit not in ("seeds", "pipeline", "gradients")
with Session(model=model, optimizer=optimizer, ddp=ddp, extra={"meter": meter}) as session:
    for step in session.steps(STEPS):
        with step:
            random = torch.Generator().manual_seed(1000 * step.number + session.rank)
            inputs = torch.randn(4, 8 if habit == "pipeline" and rank else 4, generator=random)
            optimizer.zero_grad()
            session.model(inputs).square().mean().backward()
            if habit == "seeds":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            if habit == "meter":
                meter.count += rank
            if habit == "continue" and rank == 1 and step.number == 20:
                continue
            if habit == "killed" and rank == 1 and step.number == 20 and session.generation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if habit == "bit" and session.rank == 2 and step.number == 70 and not flipped:
                flipped = True
                model[2].weight.data.view(torch.int32)[3, 3] ^= 1 << 20
state = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("final", hashlib.sha256(state).hexdigest(), flush=True)
"""


@pytest.fixture
def run(job: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """Return a function that runs a job of the script with this habit to its end."""

    def start(habit: str, processes: int = 2, policy: Policy | None = None, every: int = 10) -> Job:
        script = tmp_path / f"{habit}.py"
        script.write_text(SCRIPT.replace("HABIT", habit).replace("STEPS", str(STEPS)))
        chosen = policy or Policy(max_restarts=3)
        return job(nodes=1, processes=processes, policy=chosen, script=script, snapshot_every=every)

    return start


def finals(run: Job) -> set[str]:
    """Return the digests of the ranks' last parameters."""
    logs = Path(run.spec.log_directory, "attempt_0").glob("*/stdout.log")
    return {found for log in logs for found in re.findall(r"final (\w+)", log.read_text())}


@pytest.mark.parametrize(
    ("habit", "remedy"),
    [("pipeline", "shard="), ("seeds", "ddp=True"), ("gradients", "all-reduce")],
)
def test_states_that_were_never_equal(habit: str, remedy: str, run: Callable[..., Job]) -> None:
    """The job ends after its first step. The text names the ranks and the remedy."""
    ended = run(habit)
    assert ended.end().outcome == "failed", ended.story()
    [incident] = ended.incidents()
    assert incident.cause.kind is FaultKind.REPLICAS
    assert "ranks 0, 1 hold different states after step 1 (" in incident.cause.message
    assert remedy in incident.cause.message
    assert incident.cause.finished == 1


def test_a_skipped_update(run: Callable[..., Job]) -> None:
    """A `continue` on one rank differs again after the return to a snapshot; then the job ends."""
    ended = run("continue")
    assert ended.end().outcome == "failed", ended.story()
    first, second = ended.incidents()
    assert first.strategy is Strategy.RETRY
    assert first.resumed_at == 10
    assert "steps 17 to 32 may be wrong on all ranks" in second.reason
    assert "the same tensors differ again" in second.reason
    assert ended.events_of(journal.Suspected)[-1].valid_steps == 16


def test_a_changed_bit(run: Callable[..., Job]) -> None:
    """All ranks return to a snapshot from before the change, and end as without the change."""
    ended = run("bit", 3)
    assert ended.end().outcome == "succeeded", ended.story()
    [incident] = ended.incidents()
    assert (incident.cause.kind, incident.cause.rank) == (FaultKind.REPLICAS, 2)
    assert incident.cause.signature == "2.weight"
    assert "rank 2 holds another state than ranks 0, 1" in incident.reason
    # The agents learn late which steps are equal, so the snapshot of step 60 may be gone.
    assert incident.resumed_at in range(10, 61, 10)
    changed = finals(ended)
    other = run("nothing", 3)
    assert other.end().outcome == "succeeded", other.story()
    assert not other.incidents()
    assert changed == finals(other)
    assert len(changed) == 1


def test_a_changed_bit_without_an_older_state(run: Callable[..., Job]) -> None:
    """Without snapshots the job ends, and names the steps that may be wrong."""
    ended = run("bit", 3, every=0)
    assert ended.end().outcome == "failed", ended.story()
    [incident] = ended.incidents()
    assert "steps 65 to 100 may be wrong on all ranks" in incident.reason
    assert "no snapshot or checkpoint is from before that" in incident.reason


def test_a_policy_that_warns(run: Callable[..., Job]) -> None:
    """With `warn` the job trains to its end, and the journal has the difference once."""
    ended = run("bit", 3, Policy(replicas=Replicas.WARN))
    assert ended.end().outcome == "succeeded", ended.story()
    assert not ended.incidents()
    [event] = ended.events_of(journal.RanksDiffer)
    assert event.step == STEPS
    assert 2 in event.ranks


def test_other_objects(run: Callable[..., Job]) -> None:
    """An object in `extra` that differs is no fault: the journal names it once."""
    ended = run("meter")
    assert ended.end().outcome == "succeeded", ended.story()
    [event] = ended.events_of(journal.RanksDiffer)
    assert event.item == "meter"


def test_a_replaced_rank_is_equal(run: Callable[..., Job]) -> None:
    """After a usual recovery the ranks agree."""
    ended = run("killed")
    assert ended.end().outcome == "succeeded", ended.story()
    [incident] = ended.incidents()
    assert incident.strategy is Strategy.RECOVER_IN_PLACE
    assert not ended.events_of(journal.RanksDiffer)
