"""Checkers measure devices and links; they detect wrong results in each exchange."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, formed, run

from rekindle.recovery.node_check.evidence import Measurement
from rekindle.training.node_check import torch_checker
from rekindle.training.node_check.serving import WINDOWS, WrongResultError
from rekindle.training.node_check.torch_checker import Bench

SMALL = Bench(
    device=torch.device("cpu"),
    backend="gloo",
    size=128,
    dtype=torch.float32,
    copied=1 << 16,
    sent=1 << 12,
    window_s=0.001,
    wait=lambda: None,
)
EXCHANGES = 1 + 2 * WINDOWS


def _spoil_transfer(count: int) -> None:
    transfer, seen = dist.batch_isend_irecv, iter(range(EXCHANGES))

    def spoilt(operations: list[dist.P2POp]) -> list[dist.Work]:
        for each in transfer(operations):
            each.wait()
        if next(seen) == count:
            operations[1].tensor[-1] = -7.0
        return []

    dist.batch_isend_irecv = spoilt


def _leave_out_transfer(count: int) -> None:
    """Leave out one transfer; the receiver still has the bytes of an earlier transfer."""
    transfer, seen = dist.batch_isend_irecv, iter(range(EXCHANGES))
    dist.batch_isend_irecv = lambda each: transfer(each) if next(seen) != count else []


def _spoil_gather(count: int) -> None:
    gather, seen = dist.all_gather, iter(range(EXCHANGES))

    def spoilt(gathered: list[torch.Tensor], own: torch.Tensor) -> None:
        gather(gathered, own)
        if next(seen) == count:
            gathered[1][0] += 1.0

    dist.all_gather = spoilt


def _measured(rank: Rank, spoil: Callable[[int], None] | None, count: int) -> str:
    group = formed(rank)
    if spoil is not None:
        spoil(count)
    try:
        return "well" if torch_checker.together(SMALL) > 0.0 else "nothing"
    except WrongResultError as error:
        return str(error)
    finally:
        group.leave()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_that_come_out_well(world_size: int) -> None:
    """Collectives give a measurement in a pair and among the devices of a node, of any number."""
    assert run(_measured, world_size, None, 0) == ["well"] * world_size


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_spoil_transfer, "a transfer returned wrong values"),
        (_leave_out_transfer, "a transfer returned wrong values"),
        (_spoil_gather, "a collective returned wrong values"),
    ],
)
@pytest.mark.parametrize("count", [0, 4, EXCHANGES - 1])
def test_a_value_that_is_wrong_is_seen_in_each_exchange(
    spoil: Callable[[int], None], text: str, count: int
) -> None:
    """A checker detects a wrong value in the first, a middle and the last exchange.

    Bytes left from an earlier exchange do not hide a transfer that is left out.
    """
    assert run(_measured, 2, spoil, count) == [text] * 2


def test_a_device_that_works_is_measured() -> None:
    """The measurements of a healthy device, for compute and memory, are greater than zero."""
    assert all(
        torch_checker.alone(SMALL)[part] > 0.0 for part in (Measurement.COMPUTE, Measurement.MEMORY)
    )


def test_a_product_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker detects one wrong element in a matrix product."""
    fast = torch.mm

    def wrong(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        fast(left, right, out=out)
        out[5, 5] += 1.0

    monkeypatch.setattr(torch, "mm", wrong)
    with pytest.raises(WrongResultError, match="product"):
        torch_checker.alone(SMALL)
