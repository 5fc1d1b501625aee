"""Forward passes on a device that computes asynchronously; its marks are simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rekindle.profiling.files import lines_of
from rekindle.profiling.markers import ranges
from rekindle.profiling.steps import Steps, StepTimes
from rekindle.profiling.switch import switch_of
from rekindle.protocol.rank import Profile
from rekindle.rank import environment as rank_environment
from rekindle.training.devices import CpuDevice
from rekindle.training.torch import profiler as torch_profiler
from rekindle.training.torch.profiler import TorchProfiler

ON = Profile(switch=switch_of(["step", "forward"]), since=1)


class SimulatedDevice(CpuDevice):
    """A device whose marks are 250 ms apart, and pass when the test sets `done`."""

    def __init__(self) -> None:
        self.asked = self.done = 0
        self.broken = False

    def mark(self) -> Moment:
        self.asked += 1
        return Moment(self, self.asked)


class Moment:
    def __init__(self, device: SimulatedDevice, number: int) -> None:
        self._device, self.number = device, number

    def query(self) -> bool:
        if self._device.broken:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return self.number <= self._device.done

    def elapsed_time(self, end: Moment) -> float:
        return 250.0 * (end.number - self.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    simulated = SimulatedDevice()
    monkeypatch.setattr(torch_profiler, "device_for", lambda device: simulated)
    return simulated


Written = Callable[[], list[StepTimes]]


@pytest.fixture
def profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice
) -> tuple[TorchProfiler, torch.nn.Module, Written]:
    """Return a profiler, its model, and a function that closes it and returns its records."""
    monkeypatch.setattr(rank_environment, "path", lambda name: tmp_path)
    model = torch.nn.Linear(2, 2)
    made = TorchProfiler(0, 0, model)

    def written() -> list[StepTimes]:
        made.close()
        (folder,) = tmp_path.glob("*/0")
        return list(Steps().read(ranges(lines_of(folder))))

    return made, model, written


def train(profiler: TorchProfiler, model: torch.nn.Module, step: int) -> None:
    profiler.begin_step(step, ON)
    model(torch.ones(2))
    profiler.end_step()


def test_a_pass_takes_what_it_took_on_the_device(
    profiler: tuple[TorchProfiler, torch.nn.Module, Written], device: SimulatedDevice
) -> None:
    """Each step has the device time of its forward pass, also if it is known two steps later."""
    made, model, written = profiler
    for step in range(4):
        train(made, model, step)
        device.done = device.asked - 4
    device.done = device.asked
    assert [(each.step, round(each.forward, 6)) for each in written()] == [
        (step, 0.25) for step in range(4)
    ]


def test_what_a_device_does_not_finish_is_not_waited_for(
    profiler: tuple[TorchProfiler, torch.nn.Module, Written], device: SimulatedDevice
) -> None:
    made, model, written = profiler
    for step in range(3):
        train(made, model, step)
        device.done = 2
    assert [each.step for each in written()] == [0]


def test_a_device_with_a_fault_breaks_no_record(
    profiler: tuple[TorchProfiler, torch.nn.Module, Written], device: SimulatedDevice
) -> None:
    """After a device error, the profiler records later steps without the unknown times."""
    made, model, written = profiler
    train(made, model, 0)
    device.broken = True
    train(made, model, 1)
    device.broken, device.done = False, 100
    train(made, model, 2)
    assert [each.step for each in written()] == [2]
