"""init() and DistributedDataParallel: the lines of a script for torchrun, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DistributedSampler

from rekindle.errors import SessionError
from rekindle.training.torch import DistributedDataParallel, Session, init
from rekindle.training.torch.groups import script_groups
from rekindle.training.torch.groups.script_groups import timeout_of


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no process group, and no values of init(), to the next test."""
    monkeypatch.setattr(script_groups, "_given", None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def session_of(model: nn.Module, **settings: Any) -> Session:
    """Return a session with an optimizer."""
    return Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_the_world_before_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """After init() the script knows its rank, and a collective names its place."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    init("gloo", timeout=timedelta(minutes=2), world_size=3, rank=1)
    assert (dist.get_rank(), dist.get_world_size(), dist.is_initialized()) == (1, 3, True)
    assert list(DistributedSampler(range(9), shuffle=False)) == [1, 4, 7]  # type: ignore[arg-type]
    for send in (dist.barrier, lambda: dist.all_gather_object([0, 0, 0], 1)):
        with pytest.raises(SessionError, match="before the Session"):
            send()
    with pytest.raises(SessionError, match=r"import it from rekindle\.training\.torch"):
        TorchDDP(net())
    with pytest.raises(SessionError, match=r"call init\(\) instead of .* only once"):
        init()


def test_arguments_of_init(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Session takes backend and time limit, and a line names what has no effect."""
    with pytest.raises(SessionError, match=r"init\(world_size=4\), but .* world_size 1"):
        init("nccl", "env://", world_size=4)
    init("gloo", "tcp://host:1", timedelta(seconds=9), store=dist.HashStore())
    assert "init() makes no use of store, init_method: " in capfd.readouterr().err
    given = session_of(net())._loop.given
    assert (given.backend, given.timeout_s) == ("gloo", 9.0)
    given = session_of(net(), backend="own")._loop.given
    assert (given.backend, given.timeout_s) == ("own", 9.0)
    assert (timeout_of(3), timeout_of(None)) == (3, 9.0)
    dist.destroy_process_group()
    init("cpu:gloo,cuda:nccl")
    assert "init() makes no use of backend: " in capfd.readouterr().err
    assert session_of(net())._loop.given.backend is None


def test_the_wrapper_is_like_that_of_torch() -> None:
    """Parameters, names, modes and copies are as with torch's class, without a process group."""
    module = net()
    model = DistributedDataParallel(module, device_ids=None, init_sync=True)
    assert model.module is module
    assert [id(each) for each in model.parameters()] == [id(each) for each in module.parameters()]
    assert list(model.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model.eval()(torch.ones(3, 2)), module(torch.ones(3, 2)))
    assert (model.training, module.training) == (False, False)
    module.train()
    assert model.training
    assert model.require_backward_grad_sync
    average = AveragedModel(model)
    average.update_parameters(model)
    assert next(iter(average.state_dict())) == "n_averaged"
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(SessionError, match="only be called once"):
        model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(SessionError, match="different numbers of batches"):
        model.join()
    with pytest.raises(TypeError, match="find_unused"):
        DistributedDataParallel(module, find_unused=True)


REFUSED = [
    (lambda: DistributedDataParallel(net()), {"ddp": {"static_graph": True}}, "arguments there"),
    (lambda: nn.Sequential(DistributedDataParallel(net())), {}, "wrap the other way"),
    (lambda: DistributedDataParallel(net(), process_group=3), {}, "leave process_group out"),
]


@pytest.mark.parametrize(("make", "settings", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_wrappers_that_are_refused(make: Any, settings: dict[str, Any], text: str) -> None:
    """A Session refuses arguments that are given twice, and a wrapper that it cannot renew."""
    with pytest.raises(SessionError, match=text):
        session_of(make(), **settings)
