"""Requests side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rekindle.checkpoints.s3 import client as s3_client

A = TypeVar("A")
B = TypeVar("B")


def in_parallel(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """What work gives for each item, begun in their order; the first failure ends it all."""
    with ThreadPoolExecutor(s3_client.THREADS, thread_name_prefix="rekindle-s3") as pool:
        futures = deque(pool.submit(work, item) for item in items)
        found = []
        try:
            # No name for the one that is waited for: it holds its failure, whose frames would hold
            # it, and with it the bytes that were to be sent.
            while futures:
                found.append(futures.popleft().result())
        except BaseException:
            futures.clear()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return found
