"""Fixtures: the command in this process, and a store of real states."""

from checkpoint_fixtures import checkpoints, store

__all__ = ["checkpoints", "store"]
