"""A directory store of each test's own."""

from stores.fixtures import root, store

__all__ = ["root", "store"]
