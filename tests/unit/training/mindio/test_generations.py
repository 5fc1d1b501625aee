"""The time at which a device stops: not during an update, but directly after it."""

from __future__ import annotations

import threading

import pytest
from waiting import join, wait_asleep, wait_set

from rekindle.training.mindio import mindio_generations as module
from rekindle.training.mindio.mindio_generations import DeviceStop


class Device:
    """A device that records whether it was stopped, and by which thread."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def stop(self) -> None:
        self.thread = threading.current_thread()
        self.stopped.set()


def thread_of_brake() -> threading.Thread:
    """Return the thread that waits to stop the device."""
    return next(thread for thread in threading.enumerate() if thread.name == "rekindle-device-stop")


@pytest.fixture
def device() -> Device:
    """Return a device."""
    return Device()


def test_a_device_is_stopped_by_another_thread(device: Device) -> None:
    """Another thread stops the device once for several requests, and `wait` returns after that."""
    device_stop = DeviceStop(device.stop)
    device_stop.release(3)
    device_stop.pull(3)
    device_stop.pull(3)
    assert device_stop.wait()
    assert device.stopped.is_set()
    assert device.thread is not threading.current_thread()


def test_an_update_that_has_begun_ends_first(device: Device) -> None:
    """The device stops after a running update. No update may begin until training continues."""
    device_stop = DeviceStop(device.stop)
    assert device_stop.begin_update()
    device_stop.pull(1)
    wait_asleep(thread_of_brake())
    assert not device.stopped.is_set()
    assert device_stop.updating
    device_stop.end_update(1)
    wait_set(device.stopped)
    assert not device_stop.begin_update()
    device_stop.release(1)
    assert not device_stop.pulled
    assert device_stop.begin_update()


def test_an_update_that_others_have_done_may_still_begin(device: Device) -> None:
    """If other ranks have done an update, this rank may still begin it before the stop.

    Its gradients are already sent. Otherwise the rank would need a peer's state.
    """
    device_stop = DeviceStop(device.stop)
    device_stop.release(4)
    device_stop.pull(5)
    assert device_stop.begin_update()
    device_stop.end_update(5)
    assert device_stop.wait()
    assert not device_stop.begin_update()


def test_what_has_raised_is_not_waited_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an update breaks off, the stop does not wait for it, because it never ends."""
    monkeypatch.setattr(module, "REACH_S", 1000.0)
    monkeypatch.setattr(module, "UPDATE_S", 1000.0)
    device_stop = DeviceStop(device.stop)
    device_stop.begin_update()
    device_stop.break_off()
    device_stop.pull(7)
    wait_set(device.stopped)
    assert device_stop.updating


def test_an_update_that_must_not_begin_waits_for_the_stop() -> None:
    """If an update must not begin, the training thread waits until the device has stopped."""
    go = threading.Event()
    device_stop = DeviceStop(lambda: wait_set(go))
    device_stop.pull(0)
    begun: list[bool] = []
    trains = threading.Thread(target=lambda: begun.append(device_stop.begin_update()))
    trains.start()
    wait_asleep(trains)
    assert begun == []
    go.set()
    join(trains)
    assert begun == [False]


def test_a_stop_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """If a stop fails, `wait` returns False, and stderr has the traceback."""
    device_stop = DeviceStop(lambda: 1 / 0)
    device_stop.pull(0)
    assert not device_stop.wait()
    assert "ZeroDivisionError" in capfd.readouterr().err
