"""When a device is stopped: not in an update, and no later than that."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rekindle.training.mindio import brake as module
from rekindle.training.mindio.brake import Brake

LIMIT_S = 20.0


class Device:
    """Knows whether it was stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def stop(self) -> None:
        self.thread = threading.current_thread()
        self.stopped.set()


@pytest.fixture
def device() -> Device:
    """One device."""
    return Device()


def test_a_device_is_stopped_by_another_thread(device: Device) -> None:
    """Once for all who ask, and waited for."""
    brake = Brake(device.stop)
    brake.release(3)
    brake.pull(3)
    brake.pull(3)
    assert brake.wait()
    assert device.stopped.is_set()
    assert device.thread is not threading.current_thread()


def test_an_update_that_has_begun_ends_first(device: Device) -> None:
    """Nobody stops the device in it; the next may not begin, until training goes on."""
    brake = Brake(device.stop)
    assert brake.begin_update()
    brake.pull(1)
    assert not device.stopped.wait(module.REACH_S + 0.3)
    assert brake.updating
    brake.end_update(1)
    assert device.stopped.wait(LIMIT_S)
    assert not brake.begin_update()
    brake.release(1)
    assert not brake.pulled
    assert brake.begin_update()


def test_an_update_that_others_have_done_may_still_begin(device: Device) -> None:
    """Its gradients are on their way: the rank would need a peer's state else."""
    brake = Brake(device.stop)
    brake.release(4)
    brake.pull(5)
    assert brake.begin_update()
    brake.end_update(5)
    assert brake.wait()
    assert not brake.begin_update()


def test_what_has_raised_is_not_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that broke off never ends."""
    monkeypatch.setattr(module, "REACH_S", 1000.0)
    monkeypatch.setattr(module, "UPDATE_S", 1000.0)
    brake = Brake(device.stop)
    brake.begin_update()
    brake.break_off()
    brake.pull(7)
    assert device.stopped.wait(LIMIT_S)
    assert brake.updating


def test_an_update_that_must_not_begin_waits_for_the_stop() -> None:
    """The thread that trains goes on when its device is stopped, and no sooner."""
    go = threading.Event()
    brake = Brake(lambda: go.wait(LIMIT_S) and None)
    brake.pull(0)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(brake.begin_update)
        time.sleep(0.1)
        assert not begun.done()
        go.set()
        assert begun.result(LIMIT_S) is False


def test_a_stop_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """With its traceback, to whoever waits for it."""
    brake = Brake(lambda: 1 / 0)
    brake.pull(0)
    assert not brake.wait()
    assert "ZeroDivisionError" in capfd.readouterr().err
