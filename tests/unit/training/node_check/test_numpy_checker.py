"""The check of nodes without PyTorch: NumPy measures them and their connections."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from waiting import bound_s, result_of

from rekindle.protocol.node_check import DeviceWork, Done, Meet
from rekindle.recovery.node_check.evidence import Measurement
from rekindle.training.node_check import numpy_checker as plain_checker
from rekindle.training.node_check.numpy_checker import PlainKit, Processor, device_for
from rekindle.training.node_check.serving import WrongResultError


def meet(kits: list[PlainKit], serial: int) -> list[Done]:
    """Let all kits meet at the first one, and return their results."""

    def one(rank: int) -> Done:
        task = Meet(
            serial=serial,
            part=Measurement.LINK,
            host="127.0.0.1",
            port=kits[0].port,
            rank=rank,
            world_size=len(kits),
            timeout_s=bound_s(),
        )
        return kits[rank].meet(task)

    with ThreadPoolExecutor(len(kits)) as pool:
        return [result_of(each) for each in [pool.submit(one, r) for r in range(len(kits))]]


def close(kits: list[PlainKit]) -> None:
    """Close the connections and listeners of the kits."""
    for kit in kits:
        kit.hang_up()
        if kit._listener is not None:
            kit._listener.close()


def test_a_host_is_measured_alone() -> None:
    """The check of one host measures a product and a copy, and finds correct results."""
    kit = PlainKit(1, Processor())
    done = kit.work(DeviceWork(serial=7))
    assert done.serial == 7
    assert done.seconds.keys() == {Measurement.COMPUTE, Measurement.MEMORY}
    assert all(0 < seconds < 1 for seconds in done.seconds.values())
    assert kit.port == 0


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("matmul", lambda real: lambda a, b, out: real(a, b + 1, out=out)),
        ("copyto", lambda real: lambda to, what: real(to, what + 1)),
    ],
)
def test_wrong_results_are_seen(
    name: str, spoil: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a host computes or copies wrongly, the check raises WrongResultError."""
    monkeypatch.setattr(plain_checker.np, name, spoil(getattr(np, name)))
    with pytest.raises(WrongResultError):
        PlainKit(1, Processor()).work(DeviceWork(serial=1))


@pytest.fixture
def mindspore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a simulated MindSpore that raises an error if it is imported."""
    (tmp_path / "mindspore.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("mindspore")
def test_without_an_npu_the_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an NPU, the check measures the processor, and does not import MindSpore."""
    monkeypatch.setattr(plain_checker, "count_npus", lambda: 0)
    device = device_for(0)
    assert isinstance(device, Processor)
    assert not device.note


def test_without_mindspore_the_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MindSpore, the check measures the processor, even on a node with NPUs."""
    monkeypatch.setattr(plain_checker, "count_npus", lambda: 8)
    monkeypatch.setattr(plain_checker.importlib.util, "find_spec", lambda name: None)
    assert isinstance(device_for(0), Processor)


@pytest.mark.usefixtures("mindspore")
@pytest.mark.parametrize("usable", [True, False])
def test_an_npu_is_measured_if_mindspore_can_use_it(
    usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If MindSpore can use NPUs, the check measures the rank's NPU; otherwise it adds a note."""
    adapter = types.ModuleType("adapter")
    adapter.knows_ascend = lambda: usable
    adapter.MindSporeDevice = lambda *device: device
    name = "rekindle.training.node_check.mindspore_device"
    monkeypatch.setitem(sys.modules, name, adapter)
    monkeypatch.setattr(plain_checker, "count_npus", lambda: 8)
    device = device_for(3)
    if usable:
        assert device == ("Ascend", 3)
    else:
        note = PlainKit(3, device).work(DeviceWork(serial=1)).note
        assert (
            note
            == "the check did not measure the NPUs, because MindSpore cannot use them on this node"
        )


@pytest.mark.process
def test_nodes_meet_again_and_again() -> None:
    """Two nodes with two devices each can meet several times at the first one.

    Earlier meetings do not affect a later one.
    """
    kits = [
        PlainKit(0, Processor()),
        PlainKit(1, Processor()),
        PlainKit(0, Processor()),
        PlainKit(1, Processor()),
    ]
    try:
        for serial in (1, 2, 5):
            done = meet(kits, serial)
            assert [each.serial for each in done] == [serial] * 4
            assert all(0 < each.seconds[Measurement.LINK] < 5 for each in done)
    finally:
        close(kits)


@pytest.mark.process
def test_a_value_that_is_lost_on_its_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a value changes during its transmission, the check finds it: each kit knows the sum."""
    received, count = plain_checker._received, iter(range(100))
    lock = threading.Lock()

    def spoilt(line: object) -> object:
        array = received(line).copy()
        with lock:
            array[-1] += next(count) == 2  # the first rank's, so that all get a wrong sum
        return array

    monkeypatch.setattr(plain_checker, "_received", spoilt)
    kits = [PlainKit(0, Processor()), PlainKit(0, Processor())]
    try:
        with pytest.raises(WrongResultError, match="wrong values"):
            meet(kits, 1)
    finally:
        close(kits)
