"""States that may be wrong, as the journal records them."""

import pytest

from rekindle.coordinator.machine.inheritance import earlier
from rekindle.recovery.journal.journal import Suspected
from rekindle.states import is_clean


@pytest.mark.parametrize(
    ("state", "clean"), [((7, 1), True), ((8, 1), False), ((8, 2), False), ((8, 3), True)]
)
def test_what_a_rank_says_to_be_wrong(state: tuple[int, int], clean: bool) -> None:
    """A report excludes later steps of its generation and of earlier ones, not of later ones."""
    events = [
        Suspected(generation=2, valid_steps=7, rank=1),
        Suspected(generation=1, valid_steps=9, rank=0),
    ]
    assert is_clean(state, earlier(events).suspicions) == clean
