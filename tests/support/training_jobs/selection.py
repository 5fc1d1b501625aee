"""Which cases of a test are run each time, and which with the soak (`make soak`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def soak_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases, of which these are run each time, and the others with the soak alone.

    They take seconds each, and differ in where a fault strikes: some of all kinds are run always.
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
