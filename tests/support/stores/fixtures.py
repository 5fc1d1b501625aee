"""Fixtures: a directory store for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.checkpoints.directory import DirectoryStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(root)
