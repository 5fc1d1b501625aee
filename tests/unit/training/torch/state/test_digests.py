"""Digests of the state that ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rekindle.protocol.heartbeat_page import HeartbeatPage, StateDigest
from rekindle.rank.progress import HeldState, RankPlace
from rekindle.states import StateId
from rekindle.training.torch.state.digests import (
    EVERY,
    ReplicaDigests,
    digests_of,
    grouped,
    is_compared,
    sum_on_device,
)


class Counted:
    """An object with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Rank:
    """A rank in a world of two, after its first step."""

    def __init__(self, value: Any = 1, *, world_size: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.page = HeartbeatPage()
        named = {"model": self.model, "optimizer": self.optimizer, "meter": Counted(value)}
        self.digests = ReplicaDigests(
            self.model, self.optimizer, named, ["meter"], RankPlace(0), self.page
        )
        self.digests.begin(RankPlace(0, generation=1), world_size)
        self.update()

    def update(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def shown(self, step: int, *, last: bool = False) -> tuple[StateDigest, ...]:
        """Return the digests that the rank shows after a step."""
        before, _ = self.page.digests_after(0)
        self.digests.step_done(StateId(step, 1), last=last)
        return self.page.digests_after(before)[1]


def test_the_compared_steps_follow_from_their_number() -> None:
    """Ranks compare after 1, 2, 4, ... 64 steps, and then after each 64th."""
    compared = [step for step in range(1, 200) if is_compared(step)]
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 192]


def test_the_first_step_of_a_generation_and_the_last_one_are_compared() -> None:
    """A rank also shows the first step of a generation, and the last step of the run."""
    rank = Rank()
    assert rank.shown(5)
    assert not rank.shown(7)
    assert rank.shown(9, last=True)


def test_equal_ranks_show_equal_digests() -> None:
    """Equal states have equal digests; one bit of a parameter or of a moment changes them."""
    one, other = Rank(), Rank()
    assert one.shown(1) == other.shown(1)
    other.model[0].weight.data.view(torch.int32)[2, 1] ^= 1
    assert one.shown(2)[0] != other.shown(2)[0]
    found = (rank.digests.tensors(StateId(2, 1)) for rank in (one, other))
    mine, theirs = found
    assert [name for name in mine if mine[name] != theirs[name]] == ["0.weight"]
    assert "optimizer.exp_avg.0.weight" in mine


def test_statistics_do_not_count_and_other_objects_count_apart() -> None:
    """A buffer changes no digest. An object in `extra` has a digest of its own."""
    one, other = Rank(1), Rank(2)
    other.model[1].running_mean += 1
    mine, theirs = one.shown(1), other.shown(1)
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True, True, False]
    assert one.digests.items[mine[2].item - 1] == "meter"
    assert len(one.shown(EVERY * 2)) == 1  # other objects are compared at the beginning


def test_an_object_that_a_state_cannot_contain_has_no_digest() -> None:
    """A snapshot refuses such an object; the comparison leaves it out."""
    assert Rank(object()).shown(1)[2].value == 0


def test_a_rank_without_another_one_computes_nothing() -> None:
    """A world of one rank, and a shard that no other rank has, are not compared."""
    assert not Rank(world_size=1).shown(1)
    rank = Rank()
    rank.digests.begin(RankPlace(0, shard=0, shards=2), 2)
    assert not rank.shown(1)


def test_the_present_state_of_a_rank() -> None:
    """A rank reports the digest of a whole state. A torn one has none."""
    rank, held = Rank(), HeldState()
    held.hold(StateId(3, 1))
    (present,) = rank.digests.present(held, compared=False)
    assert (present.step, present.generation) == (3, 1)
    assert rank.shown(4)
    held.step_done(5, 1)
    assert not rank.digests.present(held, compared=True)
    held.tear()
    assert not rank.digests.present(held, compared=False)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.float8_e5m2],
)
@pytest.mark.parametrize("count", [0, 1, 7, 16, (1 << 15) + 3, (1 << 21) + 5])
def test_a_sum_on_a_device_sees_each_change(dtype: torch.dtype, count: int) -> None:
    """The sum changes with one value, and with the places of two values."""
    tensor = (torch.arange(count) % 2).to(dtype)
    before = int(sum_on_device(tensor))
    assert before == int(sum_on_device(tensor.clone()))
    if count > 1:
        places = {0, 1, count // 2, count - 1}
        for place in places:
            changed = tensor.clone()
            changed[place] = changed[(place + 1) % count]
            same = torch.equal(changed.view(torch.uint8), tensor.view(torch.uint8))
            assert (int(sum_on_device(changed)) == before) == same
        swapped = tensor.clone()
        swapped[[0, 1]] = swapped[[1, 0]]
        assert int(sum_on_device(swapped)) != before


def test_a_sum_of_a_view_is_that_of_its_copy() -> None:
    """The place in memory and the strides have no effect."""
    whole = torch.arange(99, dtype=torch.float32)
    assert int(sum_on_device(whole[1:])) == int(sum_on_device(whole[1:].clone()))
    table = torch.arange(6.0).view(2, 3)
    assert digests_of([("", table.t())]) == digests_of([("", table.t().contiguous())])


def test_many_tensors_are_grouped_by_their_names() -> None:
    """Groups have a common prefix, and a change of one tensor changes one group."""
    names = [f"layers.{layer}.{'x' * 90}.{part}" for layer in range(40) for part in range(30)]
    tensors = {name: index for index, name in enumerate(names)}
    before, after = grouped(tensors), grouped(tensors | {names[35]: -1})
    assert [name for name in before if before[name] != after[name]] == [f"layers.1.{'x' * 90}"]
    assert grouped({}) == {}
    assert list(grouped({f"{n}{'y' * 90}": 1 for n in range(2000)})) == ["all"]
