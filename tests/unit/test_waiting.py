"""Loops with a time limit."""

from __future__ import annotations

import threading

import pytest

from rekindle.waiting import join_all, retry, until


def test_until_ends_with_the_condition() -> None:
    """until() checks the condition again until it is true."""
    looks = iter([False, False, True])
    assert until(lambda: next(looks), 60.0, 0.0)
    assert not list(looks)


def test_until_ends_with_the_limit() -> None:
    """until() checks the condition once if the limit is zero."""
    assert until(lambda: True, 0.0, 0.0)
    assert not until(lambda: False, 0.01, 0.0)


def test_retry_returns_the_first_result() -> None:
    """retry() ignores errors of the given kind."""
    results = iter([KeyError("first"), KeyError("second"), "third"])

    def call() -> str:
        result = next(results)
        if isinstance(result, KeyError):
            raise result
        return result

    assert retry(call, KeyError, 60.0, 0.0) == "third"


@pytest.mark.parametrize(("error", "limit_s"), [(KeyError, 0.01), (ValueError, 60.0)])
def test_retry_raises_what_stays(error: type[Exception], limit_s: float) -> None:
    """retry() raises the last error at the limit, and an error of another kind immediately."""

    def call() -> None:
        raise error("stays")

    with pytest.raises(error, match="stays"):
        retry(call, KeyError, limit_s, 0.0)


def test_threads_share_one_limit() -> None:
    """join_all() gives the second thread the time that the first thread left of the limit."""
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    join_all(threads, 0.01)
    assert all(thread.is_alive() for thread in threads)
    ended.set()
    join_all(threads, 60.0)
    assert not any(thread.is_alive() for thread in threads)
