"""Models that are sharded before a process group exists, and the memory of a broken step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from rekindle.errors import SessionError, StaleError
from rekindle.rank.member import free_frames
from rekindle.training.torch import Session, init_placeholder_group
from rekindle.training.torch.groups.fsdp import shards_of
from rekindle.training.torch.groups.gloo_waits import InterruptibleWaits
from rekindle.training.torch.state.capture import capture

WORLD = 4


@pytest.fixture
def placeholder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create a placeholder group of four ranks in the third rank."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    init_placeholder_group()
    yield
    dist.destroy_process_group()


def cut_up(*sizes: int) -> nn.Module:
    """Return a model on a mesh of these sizes; the last dimension shards it."""
    model = nn.Linear(5, 7)
    names = ("replicate", "shard")[-len(sizes) :]
    return fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))


@pytest.mark.usefixtures("placeholder")
@pytest.mark.parametrize(
    ("sizes", "shards"), [((4,), [0, 1, 2, 3]), ((2, 2), [0, 1, 0, 1]), ((4, 1), [0, 0, 0, 0])]
)
def test_who_holds_what_is_told_by_the_mesh(sizes: tuple[int, ...], shards: list[int]) -> None:
    """The mesh shows each rank's shard before a process group exists."""
    model = cut_up(*sizes)
    assert shards_of(model, WORLD) == shards


@pytest.mark.usefixtures("placeholder")
def test_this_ranks_piece_is_its_own_part_of_the_whole() -> None:
    """Every rank builds the whole model from the same seed and keeps its own, uneven, piece."""
    torch.manual_seed(3)
    whole = nn.Linear(5, 7).weight.detach().clone()
    torch.manual_seed(3)
    state = capture({"model": cut_up(4)})
    assert torch.equal(state.tensors["model.weight"], whole[4:6])


@pytest.mark.usefixtures("placeholder")
def test_nothing_is_sent_in_a_placeholder() -> None:
    """A collective in a placeholder group raises an error, because it would reach no rank."""
    for send in (dist.barrier, lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(SessionError, match="before the Session"):
            send()


@pytest.mark.usefixtures("placeholder")
def test_a_placeholder_in_a_group() -> None:
    """If a process group exists already, init_placeholder_group() raises an error with a remedy."""
    with pytest.raises(SessionError, match="instead of init_process_group"):
        init_placeholder_group()


@pytest.mark.usefixtures("placeholder")
def test_a_mesh_of_some_ranks() -> None:
    """If a mesh lacks some ranks, Rekindle cannot know equal shards, and raises SessionError."""
    model = nn.Linear(5, 7)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    fully_shard(model, mesh=mesh)
    with pytest.raises(SessionError, match="has 2 ranks, not all 4"):
        shards_of(model, WORLD)


@pytest.mark.usefixtures("placeholder")
def test_ddp_of_a_model_that_is_cut_up() -> None:
    """A Session refuses DDP of a sharded model, because DDP needs the whole on every rank."""
    model = cut_up(4)
    with pytest.raises(SessionError, match="ddp needs the complete state on every rank"):
        Session(model=model, optimizer=torch.optim.SGD(model.parameters()), ddp=True)


@pytest.mark.usefixtures("placeholder")
def test_an_optimizer_of_before() -> None:
    """A Session refuses an optimizer that was created before fully_shard.

    It has other parameters than the model, so it would train nothing.
    """
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
    with pytest.raises(SessionError, match="create the optimizer after fully_shard"):
        Session(model=model, optimizer=optimizer)


@pytest.mark.usefixtures("placeholder")
def test_zero_that_updates_within_the_backward_pass() -> None:
    """A Session refuses overlap_with_ddp, because it cannot observe the update."""
    model = nn.Linear(5, 7)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True
    )
    with pytest.raises(SessionError, match="leave overlap_with_ddp out"):
        Session(model=model, optimizer=optimizer, ddp=True)


class Activation:
    """An object that a step holds during its wait."""


@pytest.mark.parametrize("release", [True, False])
def test_a_broken_step_holds_nothing(release: bool) -> None:
    """After a broken step, torch's future keeps the error, but not the objects of the step."""
    held: list[weakref.ref[Activation]] = []

    def step(waits: InterruptibleWaits, future: torch.futures.Future[None]) -> None:
        activation = Activation()
        held.append(weakref.ref(activation))
        waiting = waits.follow(future)
        broken = waits.release if release else lambda: future.set_exception(RuntimeError("gloo"))
        threading.Timer(0.01, broken).start()
        waiting.wait()

    try:
        step(InterruptibleWaits(), torch.futures.Future())
    except (RuntimeError, StaleError) as error:
        free_frames(error)
    assert held[0]() is None
