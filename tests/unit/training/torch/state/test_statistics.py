"""Which modules have running statistics of their rank's own batches, and how they are packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rekindle.errors import SessionError
from rekindle.training.torch.state.statistics import (
    Found,
    OtherBuffers,
    Rows,
    SharedStatistics,
    Statistics,
    find,
)


class Nets:
    """A network with several kinds of normalization."""

    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.model = nn.Sequential(
            nn.Linear(4, 4),
            self.norm,
            self.instance,
            nn.BatchNorm1d(4, track_running_stats=False),
            nn.LayerNorm(4),
            nn.SyncBatchNorm(4),
        )

    def find(self, *others: Any, ddp: dict[str, Any] | None = None, **known: Any) -> Found:
        return find(self.model, others, known=known.values(), ddp=ddp)


def test_ddp_sends_the_statistics_of_its_model() -> None:
    """They are shared, unless an argument or the script's own list keeps DDP from sending them."""
    nets = Nets()
    own = (nets.norm, nets.instance)
    assert nets.find(ddp={}) == Found(shared=own)
    assert nets.find(ddp={"broadcast_buffers": True}) == Found(shared=own)
    assert nets.find(ddp={"forward_sync_buffers": False}) == Found(alone=own)
    assert nets.find(ddp={"broadcast_buffers": False}) == Found(alone=own)
    assert nets.find() == Found(alone=own)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        nets.model, ["1.running_mean"]
    )
    assert nets.find(ddp={}) == Found(shared=(nets.instance,), alone=(nets.norm,))


def test_declared_modules_are_left_out() -> None:
    """The script may keep modules in `per_rank` or `ignore`, alone or in a larger one."""
    nets = Nets()
    assert nets.find(declared=nets.norm) == Found(alone=(nets.instance,))
    assert nets.find(declared=nn.ModuleList([nets.norm]), other="x") == Found(
        alone=(nets.instance,)
    )
    assert nets.find(ignored=nets.model) == Found()


def test_modules_outside_of_the_model() -> None:
    """A second network trains outside of DDP; a teacher does not train; an average follows."""
    nets = Nets()
    second, teacher = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    average = AveragedModel(nets.model)
    found = nets.find(second, teacher, average, [1], nets.model, ddp={})
    assert found == Found(shared=(nets.norm, nets.instance), alone=(second,))
    copies = (average.module[1], average.module[2])
    found = nets.find(teacher, average)
    assert found == Found(alone=(nets.norm, nets.instance, teacher, *copies))


def test_other_buffers() -> None:
    """They are the saved buffers of modules without running statistics."""
    nets = Nets()
    nets.model.register_buffer("table", torch.ones(2))
    nets.model[0].register_buffer("cache", torch.ones(2), persistent=False)
    assert OtherBuffers(nets.model).state_dict().keys() == {"table"}
    assert OtherBuffers(nets.model, [nets.model]).state_dict() == {}


def test_rows_hold_tensors_of_several_types() -> None:
    """Rows take and give back the values of live tensors, and know which tensors they are of."""
    tensors = [torch.arange(3.0), torch.tensor(7), torch.ones(2, 2, dtype=torch.float16)]
    rows = Rows(tensors)
    rows.read()
    before = [each.clone() for each in tensors]
    for each in tensors:
        each.zero_()
    rows.write()
    assert all(map(torch.equal, tensors, before))
    assert rows.are_of(tensors)
    assert not rows.are_of([*tensors[:2], tensors[2].clone()])
    assert not rows.are_of(tensors[:2])


def test_statistics_are_a_state() -> None:
    """A loaded state is in the live buffers, also after the script has replaced one of them."""
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    one(torch.randn(5, 3))
    other.running_mean = torch.zeros(3)
    state = Statistics([one]).state_dict()
    Statistics([other]).load_state_dict(state)
    assert all(map(torch.equal, one.buffers(), other.buffers()))


def test_statistics_that_change_after_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass after the update is refused; an exchange at the end replaces a missing one."""
    sent: list[int] = []
    dist = "rekindle.training.torch.state.statistics.dist"
    monkeypatch.setattr(f"{dist}.get_rank", lambda: 0)
    monkeypatch.setattr(f"{dist}.get_backend_config", lambda: "cpu:gloo", raising=False)
    monkeypatch.setattr(f"{dist}.broadcast", lambda row, src: sent.append(row.numel()))
    norm = nn.BatchNorm1d(3)
    shared = SharedStatistics([norm])
    shared.begin_step()
    norm(torch.randn(4, 3))
    shared.end_step()  # no optimizer has updated in this step
    shared.begin_step()
    norm(torch.randn(4, 3))
    shared.share()
    shared.end_step()
    assert sent == [16 + 16 + 8] * 2
    shared.begin_step()
    shared.share()
    norm(torch.randn(4, 3))
    with pytest.raises(SessionError, match="has changed the running statistics"):
        shared.end_step()
    SharedStatistics(()).end_step()
    assert len(sent) == 3
