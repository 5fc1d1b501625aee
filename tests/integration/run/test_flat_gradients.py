"""A script that keeps all gradients in one buffer and all-reduces it in one call, without DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from waiting import bound_s

from rekindle.recovery.policy.policy import Strategy
from rekindle.testing.runs import Report, Run

STEPS = 40
SCRIPT = f"""
import torch
import torch.distributed as dist
from rekindle.training.torch import Session, StepSampler

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = torch.randn(64, 4)
flat = torch.zeros(sum(each.numel() for each in model.parameters()))
begin = 0
for each in model.parameters():
    each.grad = flat[begin : begin + each.numel()].view(each.shape)
    begin += each.numel()

with Session(model=model, optimizer=optimizer, sampler=StepSampler(64, 8)) as session:
    for step in session.steps({STEPS}):
        with step:
            flat.zero_()
            loss = session.model(data[step.indices]).square().mean()
            loss.backward()
            dist.all_reduce(flat)
            flat /= session.world_size
            optimizer.step()
            weights = torch.cat([each.detach().flatten() for each in model.parameters()])
            step.log(loss=loss, weights=weights.tolist())
"""


def trained(run: Run) -> Report:
    report = run.wait(timeout_s=bound_s())
    assert report.succeeded, run.output
    return report


def test_a_killed_rank(tmp_path: Path, rekindle_run: Callable[..., Run]) -> None:
    """The ranks have the same weights after each step, equal to a job without a fault."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    calm = trained(rekindle_run(script, nproc_per_node=2))
    assert calm.values("weights", rank=0) == calm.values("weights", rank=1)
    run = rekindle_run(script, nproc_per_node=2)
    run.inject("kill", rank=1, step=12)
    run.inject("uce", rank=0, step=24)
    broken = trained(run)
    assert [(each.strategy, each.steps_lost) for each in broken.incidents] == [
        (Strategy.RECOVER_IN_PLACE, 0),
        (Strategy.RETRY, 0),
    ]
    for rank in (0, 1):
        assert broken.values("weights", rank) == calm.values("weights", rank)
        assert broken.values("loss", rank) == calm.values("loss", rank)
