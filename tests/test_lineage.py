"""What the journal says of states: which of them may be wrong."""

import pytest

from rekindle.recovery import journal
from rekindle.recovery.lineage import Lineage, is_clean


def formed(generation: int, step: int, made: int, source: str = "self") -> journal.Formed:
    return journal.Formed(
        generation=generation,
        world_size=2,
        step=step,
        made=made,
        sources={source: 2},
        newest=step,
    )


@pytest.mark.parametrize(
    ("made", "clean"), [((7, 1), True), ((8, 1), False), ((8, 2), False), ((8, 3), True)]
)
def test_what_a_rank_says_to_be_wrong(made: tuple[int, int], clean: bool) -> None:
    """Of the generations up to that one; what later ones made anew is right."""
    events = [formed(1, 0, 0), formed(2, 5, 1), journal.Suspected(generation=2, clean=7, rank=1)]
    line = Lineage([*events, formed(3, 7, 2)])
    assert is_clean(made, line.suspicions) == clean
