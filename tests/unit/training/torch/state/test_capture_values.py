"""Values in the states of objects: a transfer is exact, or `capture` refuses the value."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import move

from rekindle.errors import SessionError
from rekindle.training.torch.state.capture import (
    DTYPE_CODES,
    TORCH_DTYPES,
    as_bytes,
    capture,
    finish,
    prepare,
)


class Kept:
    """An object whose state is the value that it received."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def round_trip(value: Any) -> Any:
    target = {"kept": Kept(None)}
    move(capture({"kept": Kept(value)}), target)
    return target["kept"].value


def identical(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(as_bytes(a), as_bytes(b))
    if isinstance(a, (float, np.floating)):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b)


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"))
)
keys = st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")) | st.none()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_values_round_trip_exactly(value: Any):
    """The transfer keeps values and their types, also the types and order of keys."""
    assert identical(round_trip(value), value)


def test_values_that_json_has_no_words_for_round_trip():
    """Counters, numpy's scalars, infinities and integers of any size keep value and type."""
    value = {
        "counter": Counter({3: 2, 1: 1}),
        "numpy": (
            np.float64(0.1),
            np.float32(0.1),
            np.int64(-3),
            np.bool_(True),
            np.float32("nan"),
        ),
        "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1],
        "integers": [2**63, -(2**63), 2**63 - 1, -(2**200)],
        "keys": {(1, "a"): 1, 1.5: 2, None: 3, True: 4, "True": 5},
    }
    assert identical(round_trip(value), value)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_tensors_of_every_dtype_round_trip(dtype: torch.dtype):
    """The transfer keeps bits, dtype and shape, for scalars, empty tensors and any stride."""
    size = torch.empty(0, dtype=dtype).element_size()
    row = torch.randint(0, 2, (24 * size,), dtype=torch.uint8) * (1 if dtype is torch.bool else 93)
    block = row.view(dtype).view(4, 6)
    value = {
        "block": block,
        "turned": block.t(),
        "channels_last": row.view(dtype).view(2, 3, 1, 4).permute(0, 3, 2, 1),
        "sparse": block[::2, 1::3],
        "scalar": block[1, 1].clone(),
        "empty": block[:0],
        "a.b": block[0].clone(),
        "a": {"b": block[1].clone()},
    }
    copied = round_trip(value)
    assert identical(copied, value)
    assert copied["turned"].stride() == (1, 6)
    assert copied["channels_last"].squeeze(2).stride() == value["channels_last"].squeeze(2).stride()
    assert TORCH_DTYPES[DTYPE_CODES[dtype]] is dtype


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"state": {3: {"hook": print}}},
            r"^kept\.state\.3\.hook: .*type builtin_function_or_method",
        ),
        ({"list": [1, {2}]}, r"^kept\.list\.1: .*type set"),
        ({"array": np.zeros(2)}, r"^kept\.array: .*type ndarray"),
        ({"blob": b"x"}, r"^kept\.blob: .*type bytes"),
        ({"wide": torch.zeros(2, dtype=torch.complex128)}, r"^kept\.wide: .*complex128"),
        ({"sparse": torch.eye(2).to_sparse()}, r"^kept\.sparse: .*sparse"),
        ({"meta": torch.empty(2, device="meta")}, r"^kept\.meta: .*meta"),
        ({frozenset({1}): 1}, r"^kept\[.*frozenset"),
        ({"text": "\ud800"}, "JSON"),
    ],
)
def test_what_a_state_cannot_hold_is_refused_by_its_place(value: Any, message: str):
    """A SessionError names the path of the first unsupported value."""
    with pytest.raises(SessionError, match=message):
        capture({"kept": Kept(value)})


def test_an_object_that_does_not_take_its_state_over_is_found_out():
    """finish() raises SessionError if an object's state differs from the state that it received."""

    class Forgetful(Kept):
        def load_state_dict(self, state: Any) -> None:
            self.value = {"step": 0}

    named = {"kept": Forgetful(None)}
    prepare(named, capture({"kept": Kept({"step": 3})}).skeleton)
    with pytest.raises(SessionError, match=r'kept\."step": 0 instead of 3'):
        finish(named)
