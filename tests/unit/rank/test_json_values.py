"""The conversion of plain values, such as the states of callbacks, to JSON and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import SessionError
from rekindle.rank.json_values import plain, real

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_VALUES = st.recursive(
    _LEAVES, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=20
)


@given(_VALUES)
def test_values_come_back(value: Any) -> None:
    """A value is the same after JSON and back, also an infinity or an object with one entry."""
    content = json.loads(json.dumps(plain(value, "it"), allow_nan=False))
    np.testing.assert_equal(real(content), value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64("inf"),
        np.array(1.5, np.float32),
        np.zeros((0, 3), np.int8),
        np.arange(6, dtype=np.float16).reshape(2, 3).T,
    ],
)
def test_numbers_of_numpy_keep_their_type(value: Any) -> None:
    """NumPy's values keep their type, because another type may round them differently."""
    found = real(json.loads(json.dumps(plain(value, "it"))))
    assert np.asarray(found).dtype == value.dtype
    np.testing.assert_array_equal(found, value)
    assert not isinstance(found, np.ndarray) or found.flags.writeable


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": [object()]}, r"it\.a\[0\] has type object"),
        ({1: 2}, "it has type dict"),
        (b"", "it has type bytes"),
        (np.array([object()]), "it is an array of object"),
        (np.zeros(1, [("a", "f4")]), "it is an array of"),
        (np.str_("text"), "it is an array of <U4"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, what: str) -> None:
    """The conversion refuses an unsupported type by its place: before a fault, not after it."""
    with pytest.raises(SessionError, match=what):
        plain(value, "it")
