"""Loops with a time limit."""

from __future__ import annotations

import threading

import pytest

from rekindle.waiting import join_all, retry, until


def test_until_ends_with_the_condition() -> None:
    """It looks again until the condition is true."""
    looks = iter([False, False, True])
    assert until(lambda: next(looks), 60.0, 0.0)
    assert not list(looks)


def test_until_ends_with_the_limit() -> None:
    """The condition is looked at once at least."""
    assert until(lambda: True, 0.0, 0.0)
    assert not until(lambda: False, 0.01, 0.0)


def test_retry_returns_the_first_result() -> None:
    """Errors of the kind that is named are passed over."""
    results = iter([KeyError("first"), KeyError("second"), "third"])

    def call() -> str:
        result = next(results)
        if isinstance(result, KeyError):
            raise result
        return result

    assert retry(call, KeyError, 60.0, 0.0) == "third"


@pytest.mark.parametrize(("error", "limit_s"), [(KeyError, 0.01), (ValueError, 60.0)])
def test_retry_raises_what_stays(error: type[Exception], limit_s: float) -> None:
    """The last error at the limit, and any other kind at once."""

    def call() -> None:
        raise error("stays")

    with pytest.raises(error, match="stays"):
        retry(call, KeyError, limit_s, 0.0)


def test_threads_share_one_limit() -> None:
    """The second thread is waited for no longer than the first one has left."""
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    join_all(threads, 0.01)
    assert all(thread.is_alive() for thread in threads)
    ended.set()
    join_all(threads, 60.0)
    assert not any(thread.is_alive() for thread in threads)
