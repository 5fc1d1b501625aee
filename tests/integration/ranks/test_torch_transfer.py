"""The transfer of a state between ranks: exact, verified, and to several receivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import Rank, formed, run, started
from torch import nn

from rekindle.errors import CorruptError, SessionError
from rekindle.training.torch.state import transfer
from rekindle.training.torch.state.capture import as_bytes, capture
from rekindle.training.torch.state.transfer import broadcast_tensors, receive_state, send_state


def make(steps: int, width: int = 1500) -> dict[str, Any]:
    """Return a state with large tensors (9 MB, more than a piece), small, empty and turned ones."""
    torch.manual_seed(steps)
    layers = [nn.Linear(7, 11) for _ in range(30)]
    model = nn.Sequential(nn.Linear(width, width), *layers, nn.BatchNorm1d(5))
    model.register_parameter("turned", nn.Parameter(torch.randn(5, 900).t()))
    model.register_buffer("nothing", torch.empty(0, 4))
    model.register_buffer("flag", torch.tensor(steps > 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def bits(named: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    state = capture(named)
    return state.skeleton, [as_bytes(t).numpy().tobytes() for t in state.tensors.values()]


def _hands_over(rank: Rank, source: int, to: Sequence[int]) -> bool:
    group = formed(rank)
    named = make(3 if rank.rank == source else rank.rank % 2)
    pointers = [p.data_ptr() for p in named["model"].parameters()]
    if rank.rank == source:
        send_state(capture(named), to)
    elif rank.rank in to:
        receive_state(named, source)
    assert [p.data_ptr() for p in named["model"].parameters()] == pointers
    equal = bits(named) == bits(make(3))
    group.leave()
    return equal


@pytest.mark.parametrize(
    ("world_size", "source", "to"), [(2, 0, (1,)), (3, 2, (0, 1)), (3, 1, (2,)), (2, 0, ())]
)
def test_receivers_hold_the_senders_bits_afterwards(
    world_size: int, source: int, to: tuple[int, ...]
):
    """All receivers have the sender's bits, with or without an earlier optimizer state.

    Ranks that do not receive keep their state.
    """
    equal = run(_hands_over, world_size, source, to)
    assert equal == [rank == source or rank in to for rank in range(world_size)]


def _every_pair_at_once(rank: Rank) -> bool:
    group = formed(rank)
    named = make(rank.rank % 2, width=300)
    if rank.rank % 2:
        send_state(capture(named), [rank.rank - 1])
    else:
        receive_state(named, rank.rank + 1)
    group.leave()
    return bits(named) == bits(make(1, width=300))


def test_several_senders_work_at_once():
    """Several senders transfer at the same time over one group, each to its own receiver."""
    assert run(_every_pair_at_once, 4) == [True] * 4


def _with_an_accident(rank: Rank, patch: Callable[[], None]) -> str:
    group = formed(rank)
    named = make(1, width=300)
    try:
        if rank.rank == 0:
            threading.Thread(target=lambda: (rank.hear(), group.sever()), daemon=True).start()
            send_state(capture(named), [1])
        else:
            patch()
            receive_state(named, 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if rank.rank == 1:
            group.leave()
    return "nothing"


def _damage_a_tensor() -> None:
    add = transfer._add

    def damaging_add(checksum: Any, row: torch.Tensor) -> None:
        row[-1] ^= 1
        add(checksum, row)
        transfer._add = add

    transfer._add = damaging_add


def _damage_the_skeleton() -> None:
    receive = transfer._receive

    def damaging_receive(count: int, source: int, device: torch.device) -> torch.Tensor:
        row = receive(count, source, device)
        if count > 16:
            row[count // 2] ^= 1
        return row

    transfer._receive = damaging_receive


def _expect_another_model() -> None:
    transfer.prepare = lambda named, _: _prepare(named, capture(make(0, width=8)).skeleton)


_prepare = transfer.prepare


@pytest.mark.parametrize(
    ("accident", "error"),
    [
        (_damage_a_tensor, CorruptError),
        (_damage_the_skeleton, CorruptError),
        (_expect_another_model, SessionError),
    ],
)
def test_damage_is_found_out(accident: Callable[[], None], error: type[Exception]):
    """A flipped bit in a tensor or in the skeleton raises CorruptError.

    A state of another model raises SessionError. The test severs the sender, which may still wait,
    as a new generation would.
    """
    with started(_with_an_accident, 2, accident) as ranks:
        assert ranks.returned(1).startswith(error.__name__)
        ranks.tell(0, "sever")
        ranks.returned(0)


def _loses_its_sender(rank: Rank) -> str:
    group = formed(rank)
    named = make(1)
    if rank.rank == 0:
        pieces = transfer._pieces

        def halting(rows: Any) -> Any:
            for count, piece in enumerate(pieces(rows)):
                if count == 2:
                    rank.tell("half way")
                    rank.hear()
                yield piece

        transfer._pieces = halting
        send_state(capture(named), [1])
    try:
        receive_state(named, 0)
    except RuntimeError as error:
        return str(error)
    finally:
        group.leave()
    return "nothing"


def test_a_receiver_is_not_left_waiting_for_a_dead_sender():
    """If the sender is killed during a transfer, the receiver gets the error of a collective."""
    with started(_loses_its_sender, 2) as ranks:
        assert ranks.hear(0) == "half way"
        ranks.kill(0)
        assert "gloo" in ranks.returned(1)


def _broadcasts(rank: Rank) -> list[bytes]:
    group = formed(rank)
    torch.manual_seed(rank.rank)
    tensors = [
        torch.randn(1300, 1700).t(),
        torch.randn(9, 5)[::2],
        torch.randn(()).bfloat16(),
        torch.randn(70) > 0,
        torch.empty(0),
    ]
    broadcast_tensors(tensors)
    group.leave()
    return [as_bytes(t).numpy().tobytes() for t in tensors]


def test_a_broadcast_gives_all_ranks_the_bits_of_rank_0():
    """A broadcast fills tensors of each size, layout and dtype in place with rank 0's bits."""
    torch.manual_seed(0)
    first, *others = run(_broadcasts, 3)
    assert first[0] == torch.randn(1300, 1700).t().contiguous().numpy().tobytes()
    assert others == [first, first]
