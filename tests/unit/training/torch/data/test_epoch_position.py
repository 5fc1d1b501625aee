"""A new process begins at its peers' place in the loop, and takes its variables at its own one."""

from __future__ import annotations

import pytest

from rekindle.training.torch.data.epoch_position import EpochPosition, Place

BATCHES = 4  # of an epoch


def _at(epoch: int, batch: int, stage: str) -> EpochPosition:
    position = EpochPosition()
    position.epoch, position.batch, position.stage = epoch, batch, stage
    position.before = BATCHES if epoch else 0
    return position


@pytest.mark.parametrize(
    ("peers", "own", "leads"),
    [
        ((0, 2, "batches"), (0, 2, "batches"), True),
        ((0, 2, "batches"), (0, 1, "batches"), False),  # the former process had an older step
        ((0, 0, "batches"), (0, 0, "opening"), True),
        ((0, 0, "opening"), (0, 0, "batches"), True),
        ((0, 4, "closing"), (0, 4, "batches"), True),  # no code of the script is between them
        ((0, 4, "closing"), (0, 4, "closing"), True),
        ((0, 4, "batches"), (0, 4, "closing"), False),  # the script has left the loop early
        ((1, 0, "opening"), (0, 4, "closing"), False),
        ((1, 0, "batches"), (1, 0, "opening"), True),
        ((1, 1, "batches"), (1, 1, "closing"), False),
    ],
)
def test_a_process_comes_to_the_place_of_its_variables(
    peers: tuple[int, int, str], own: tuple[int, int, str], leads: bool
) -> None:
    """Otherwise the variables at the place of the peers are unknown."""
    assert _at(*peers).leads_to(Place(*own)) is leads


@pytest.mark.parametrize("varies", [False, True])
def test_a_process_without_variables(varies: bool) -> None:
    """It needs none if no rank has any."""
    position = _at(0, 2, "batches")
    position.varies = varies
    assert position.leads_to(None) is not varies


@pytest.mark.parametrize(
    ("peers", "just_left"),
    [((1, 0, "opening"), True), ((1, 0, "batches"), True), ((1, 1, "batches"), False)],
)
def test_the_epoch_before_may_have_ended_just_now(
    peers: tuple[int, int, str], just_left: bool
) -> None:
    """The variables of its end are lost then, and the new epoch may set them again."""
    assert _at(*peers).has_just_left(Place(0, BATCHES, "closing")) is just_left
