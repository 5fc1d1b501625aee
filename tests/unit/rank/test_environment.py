"""Values that a rank reads from its environment."""

from __future__ import annotations

import pytest

from rekindle import names
from rekindle.rank.environment import is_replacement


@pytest.mark.parametrize(
    ("starts", "joins", "replaces"),
    [
        pytest.param("1", "0", False, id="first start"),
        pytest.param("2", "0", True, id="started again on its node"),
        pytest.param("1", "1", True, id="first start on a spare, beside ranks that go on"),
    ],
)
def test_a_replacement_joins_or_starts_again(
    monkeypatch: pytest.MonkeyPatch, starts: str, joins: str, replaces: bool
) -> None:
    """A rank that a spare starts replaces an earlier process, like one that starts again."""
    monkeypatch.setenv(names.ENV_START_COUNT, starts)
    monkeypatch.setenv(names.ENV_JOINS, joins)
    assert is_replacement() is replaces
