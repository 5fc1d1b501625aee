"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.training.torch.state import script_names


@pytest.fixture
def only_this_module(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let the Session search only the test's module.

    The modules of all tests have more objects than a script.
    """
    file = request.module.__file__
    monkeypatch.setattr(script_names, "is_of_library", lambda _, path: path != file)
    caches = (script_names.is_of_script, script_names.has_names, script_names._modules)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()
