"""The lease to steer a job: a live holder keeps it, a silent one loses it, and nobody shares it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from waiting import finished, turns

from rekindle.coordinator import http_api as module
from rekindle.coordinator.http_api import Lease


async def hold(lease: Lease, token: str) -> None:
    """Hold the lease until this task is cancelled, as the handler of a stream does."""
    with lease.held(f"process {token}", token):
        await asyncio.Event().wait()


async def holding(lease: Lease, token: str) -> asyncio.Task[None]:
    """Start a holder, and return its task."""
    task = asyncio.create_task(hold(lease, token))
    await turns()
    assert lease.holder == f"process {token}"
    return task


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the limits short, because no test depends on their length."""
    monkeypatch.setattr(module, "LEASE_S", 0.05)
    monkeypatch.setattr(module, "ASK_S", 0.05)


def test_a_holder_that_renews_keeps_the_lease() -> None:
    """A second process is refused as soon as the holder renews the lease."""

    async def run() -> None:
        lease = Lease()
        holder = await holding(lease, "a")
        asked = asyncio.create_task(lease.is_free_for("b"))
        await turns()
        assert lease.renew("a")
        assert not await finished(asked)
        assert not lease.renew("b")
        await end(holder)
        assert lease.holder == ""

    asyncio.run(run())


def test_a_silent_holder_loses_the_lease_and_its_stream() -> None:
    """A stopped process, or one on a dead machine, does not block the job."""

    async def run() -> None:
        lease = Lease()
        stopped = await holding(lease, "a")
        assert await finished(lease.is_free_for("b"))
        other = await holding(lease, "b")
        assert stopped.cancelled()
        assert not lease.renew("a")  # it continues, and gets the name of the new holder
        assert lease.holder == "process b"
        await end(other)

    asyncio.run(run())


def test_a_holder_whose_stream_broke_gets_the_lease_again() -> None:
    """The coordinator may not have noticed the break. The old stream ends then."""

    async def run() -> None:
        lease = Lease()
        broken = await holding(lease, "a")
        assert await lease.is_free_for("a")
        again = await holding(lease, "a")
        assert broken.cancelled()
        await end(again)

    asyncio.run(run())


def test_only_one_of_two_that_wait_gets_the_lease() -> None:
    """If two processes wait for the lease of a silent holder, the second one is refused."""

    async def run() -> None:
        lease = Lease()
        stopped = await holding(lease, "a")
        assert await finished(lease.is_free_for("b"))
        late = asyncio.create_task(lease.is_free_for("c"))
        await turns()
        other = await holding(lease, "b")
        assert not await finished(late)
        await end(stopped, other)

    asyncio.run(run())
