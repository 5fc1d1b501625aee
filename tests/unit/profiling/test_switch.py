"""Valid combinations of the kinds of records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import UsageError
from rekindle.profiling.switch import WORDS, Switch, read_switch, switch_of, switched, values

FOUR = switch_of(("step",))
ALL = switch_of(("communication",))


def test_all_but_communication_go_together() -> None:
    assert switched(Switch(), (), on=True) == FOUR
    assert switched(Switch(), ("forward",), on=True) == FOUR
    assert switched(FOUR, ("communication",), on=True) == ALL
    assert switched(ALL, ("communication",), on=False) == FOUR
    assert switched(ALL, (), on=False) == Switch()
    assert switched(ALL, ("step", "communication"), on=False) == Switch()
    assert switched(FOUR, ("step",), on=False) == Switch()
    with pytest.raises(UsageError, match="off only together with communication"):
        switched(ALL, ("step",), on=False)


@pytest.mark.parametrize("on", [True, False])
def test_words_that_are_none(on: bool) -> None:
    with pytest.raises(
        UsageError, match="Step, kernels is not a kind of record; choose from communic"
    ):
        switched(ALL, ("kernels", "Step"), on=on)


@given(st.lists(st.sampled_from(WORDS)), st.lists(st.sampled_from(WORDS)), st.booleans())
def test_no_way_leads_to_what_cannot_be(before: list[str], kinds: list[str], on: bool) -> None:
    """If any kind is on, the four kinds are on, and a second equal change has no effect."""
    try:
        now = switched(switch_of(before), kinds, on=on)
    except UsageError:
        return
    assert now in (Switch(), FOUR, ALL)
    assert switched(now, kinds, on=on) == now
    fields = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")
    assert read_switch(dict(zip(fields, values(now), strict=True))) == now


@pytest.mark.parametrize(
    ("words", "switch"),
    [
        ({}, FOUR),
        ({"Step": "on"}, FOUR),
        ({"CommunicationOperator": "off"}, FOUR),
        ({"CommunicationOperator": "on"}, ALL),
        ({"Step": "off", "SaveCheckpoint": "off", "FP": "off", "DataLoader": "off"}, FOUR),
    ],
)
def test_a_missing_field_is_not_off(words: dict[str, str], switch: Switch) -> None:
    """TaskD records the four kinds unless all five fields are off."""
    assert read_switch(words) == switch
