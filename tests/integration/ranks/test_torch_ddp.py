"""DDP wrappers whose sums have the same bits in each generation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import Rank, run, started
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from waiting import bound_s

from rekindle.errors import SessionError
from rekindle.training.torch.groups.ddp import broadcast_module_state, wrap_ddp
from rekindle.training.torch.groups.generation_group import Group

STEPS = 6
RENEWED = 3  # the step before which the generation changes
CONFIGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"forward_sync_buffers": False},
]


class Model(nn.Module):
    """Several buckets, BatchNorm buffers, tied weights, a frozen layer; layers out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(90, 7)
        self.first = nn.Linear(40, 130)
        self.frozen = nn.Linear(130, 130).requires_grad_(False)
        self.norm = nn.BatchNorm1d(130)
        self.twin = nn.Linear(130, 130)
        self.twin.weight = nn.Parameter(torch.empty(130, 130).normal_(0, 0.1))
        self.other_twin = nn.Linear(130, 130)
        self.other_twin.weight = self.twin.weight
        self.middle = nn.Linear(130, 90)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.first(x).relu())).relu()
        return self.last(self.middle(self.other_twin(self.twin(x).tanh())).relu())


class Generations:
    """Forms one group after the other over the store of one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._count = 0
        self._group = Group()

    def next(self) -> None:
        self._group.leave()
        self._group = Group()
        self._count += 1
        self._group.form(
            store=self._rank.store,
            generation=self._count,
            rank=self._rank.rank,
            world_size=self._rank.world_size,
            backend="gloo",
            timeout_s=bound_s(),
        )

    def leave(self) -> None:
        self._group.leave()


@contextmanager
def generations(rank: Rank) -> Iterator[Generations]:
    warnings.simplefilter("ignore")  # DDP warns about options that a test uses
    each = Generations(rank)
    try:
        yield each
    finally:
        each.leave()


def sample(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 40, generator=source), torch.randn(16, 7, generator=source)


def make() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(
    rank: Rank, wrapper: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> float:
    x, y = sample(rank.rank, step)
    optimizer.zero_grad()
    loss = (wrapper(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def outcome(losses: list[float], model: nn.Module) -> tuple[list[float], bytes]:
    state = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
    return losses, state


def _plain(rank: Rank, each: Generations, config: dict[str, Any], renew: bool) -> Any:
    model, optimizer = make()
    each.next()
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.05, **config)
    losses = []
    for step in range(STEPS):
        if renew and step == RENEWED:
            each.next()
            wrapper = DistributedDataParallel(model, bucket_cap_mb=0.05, **config)
        losses.append(train_step(rank, wrapper, optimizer, step))
    return outcome(losses, model)


def _steady(rank: Rank, each: Generations, config: dict[str, Any], renew: str) -> Any:
    model, optimizer = make()
    each.next()
    wrapper = wrap_ddp(model, existing=None, bucket_cap_mb=0.05, **config)
    losses = []
    for step in range(STEPS):
        if renew and step == RENEWED:
            each.next()
            # As in production: some ranks kept their processes, others are replacements.
            survivor = renew == "all" or rank.rank != 2
            wrapper = wrap_ddp(
                model, existing=wrapper if survivor else None, bucket_cap_mb=0.05, **config
            )
        losses.append(train_step(rank, wrapper, optimizer, step))
    return outcome(losses, model)


def _all_configs(rank: Rank) -> list[tuple[Any, ...]]:
    with generations(rank) as each:
        return [
            (
                config,
                [_plain(rank, each, config, renew) for renew in (False, True)],
                [_steady(rank, each, config, renew) for renew in ("", "all", "mixed")],
            )
            for config in CONFIGS
        ]


def test_a_new_wrapper_sums_as_the_old_one_did():
    """A renewed wrapper gives the same losses and parameters, bit by bit, on 4 ranks.

    If torch's own wrapper is recreated, the bits differ, except if it never rebuilds its buckets.
    """
    for results in run(_all_configs, 4):
        for config, (plain, renewed_plain), steady in results:
            assert steady[0] == steady[1] == steady[2], config
            assert (plain != renewed_plain) == (not config.get("find_unused_parameters")), config


def _breaks_in_backward(rank: Rank, config: dict[str, Any]) -> tuple[Any, Any]:
    def fault(_: torch.Tensor) -> None:
        raise RuntimeError("fault")

    with generations(rank) as each:
        undisturbed = _steady(rank, each, config, "")
        model, optimizer = make()
        each.next()
        wrapper = wrap_ddp(model, existing=None, bucket_cap_mb=0.05, **config)
        losses = []
        for step in range(STEPS):
            if step in (0, RENEWED):  # static graphs treat the first step differently
                handle = model.twin.bias.register_hook(fault)
                buffers = {name: b.clone() for name, b in model.named_buffers()}
                with pytest.raises(RuntimeError):
                    train_step(rank, wrapper, optimizer, step)
                handle.remove()
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
                each.next()
                assert wrap_ddp(model, existing=wrapper, bucket_cap_mb=0.05, **config) is wrapper
                assert all(p.grad is None for p in model.parameters())
            losses.append(train_step(rank, wrapper, optimizer, step))
        return undisturbed, outcome(losses, model)


@pytest.mark.parametrize("config", CONFIGS[:4])
def test_a_wrapper_is_made_new_after_a_backward_pass_that_broke(config: dict[str, Any]):
    """A renewal after a broken backward pass leaves no trace: the repeated step has the same bits.

    The backward pass breaks after the reduction of some buckets.
    """
    for undisturbed, disturbed in run(_breaks_in_backward, 2, config):
        assert disturbed == undisturbed


def _wraps_alone(rank: Rank) -> None:
    with generations(rank) as each:
        each.next()
        if rank.rank == 0:
            wrapper = wrap_ddp(Model(), existing=None)
            wrap_ddp(wrapper.module, existing=wrapper)
            rank.tell("wrapped")
        rank.hear()


def test_wrapping_needs_no_peer():
    """A rank wraps its model twice while its peer does nothing."""
    with started(_wraps_alone, 2) as ranks:
        assert ranks.hear(0) == "wrapped"


def _keeps_what_was_put_on_it(rank: Rank) -> None:
    calls: list[str] = []

    def halve(_, bucket):  # torch compares annotations by identity and refuses postponed ones
        calls.append("comm")
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() / 2)
        return done

    with generations(rank) as each:
        each.next()
        model = nn.Linear(3, 1, bias=False)
        wrapper = wrap_ddp(model, existing=None)
        wrapper.register_forward_hook(lambda *_: calls.append("forward"))
        wrapper.register_comm_hook(None, halve)
        wrapper.eval()
        each.next()
        assert wrap_ddp(model, existing=wrapper) is wrapper
        assert not wrapper.training
        wrapper(torch.ones(1, 3)).sum().backward()
        assert calls == ["forward", "comm"]
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[0.5, 0.5, 0.5]]  # one reducer's hooks, not two


def test_what_the_script_put_on_the_wrapper_stays():
    """A renewal keeps forward hooks, the communication hook and eval mode, without duplicates."""
    run(_keeps_what_was_put_on_it, 1)


def _refusals(rank: Rank) -> None:
    with generations(rank) as each:
        each.next()
        model = nn.Linear(3, 1)
        for option in ("process_group", "device_mesh", "init_sync", "mixed_precision"):
            with pytest.raises(SessionError, match=option):
                wrap_ddp(model, existing=None, **{option: False})
        with pytest.raises(SessionError, match="wrap_ddp"):
            wrap_ddp(model, existing=DistributedDataParallel(model))
        with pytest.raises(SessionError, match="requires a gradient"):
            wrap_ddp(model.requires_grad_(False), existing=None)


def test_what_cannot_be_renewed_is_refused():
    """wrap_ddp refuses options for one generation, foreign wrappers and frozen models."""
    run(_refusals, 1)


class Buffers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(700, 900)
        self.brief = nn.Parameter(torch.randn(7, 3).bfloat16().t())
        self.frozen = nn.Parameter(torch.randn(0, 3), requires_grad=False)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("flags", torch.rand(5, 4) < 0.5)
        self.register_buffer("scratch", torch.rand(9).double(), persistent=False)


def _starts_from_its_own_seed(rank: Rank) -> list[tuple[str, Any]]:
    with generations(rank) as each:
        each.next()
        model = Buffers(seed=rank.rank)
        broadcast_module_state(model)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return [(name, t.detach().float().numpy().tobytes()) for name, t in tensors]


def test_rank_0_gives_its_parameters_and_buffers_to_all():
    """After the broadcast all ranks have rank 0's bits, for each dtype, layout and size."""
    model = Buffers(seed=0)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    wanted = [(name, t.detach().float().numpy().tobytes()) for name, t in tensors]
    assert run(_starts_from_its_own_seed, 3) == [wanted] * 3
