"""The time limit for the work of a replica server's connection, and a cancellation during it."""

from __future__ import annotations

import asyncio

import pytest
from waiting import bound_s, turns

from rekindle.supervised import within


@pytest.mark.parametrize("late", range(8))
def test_a_cancellation_is_never_ignored(late: int) -> None:
    """If a task is cancelled near the end of its work, it still ends with the cancellation."""

    async def body() -> None:
        work: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def follows() -> str:
            return await work

        task = asyncio.create_task(within(follows(), bound_s()))
        await turns()
        work.set_result("done")
        await turns(late)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert task.result() == "done"

    asyncio.run(body())


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_takes_too_long_is_cancelled(fails: bool) -> None:
    """The work ends before its caller continues, even if the work ends with an error."""
    ended = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
            if fails:
                raise OSError("closed")

    async def body() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await within(works(), 0.01)
        assert ended == [True]

    asyncio.run(body())
