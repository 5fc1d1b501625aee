"""Each test has its own directory store."""

from stores.fixtures import root, store

__all__ = ["root", "store"]
