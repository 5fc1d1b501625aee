"""The selection of a test's cases for each run and for the soak (`make soak`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def soak_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return all cases of a test, with a soak mark on all except `kept`.

    Each case takes seconds. The cases differ in the fault's position, so `kept` has some cases of
    each kind.
    """
    found = list(cases)
    assert kept
    assert all(case in found for case in kept), (kept, found)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in kept else [pytest.mark.soak],
        )
        for case in found
    ]
