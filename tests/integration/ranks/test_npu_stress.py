"""torch_npu's stress_detect in a checker: the meaning of its answers, and when it does not run."""

from __future__ import annotations

import os
import socket
import types
from collections.abc import Callable

import msgspec
import pytest
import torch

from rekindle.protocol.node_check import DeviceWork, Done
from rekindle.recovery.node_check.evidence import Alone, Evidence, Measurement, NodeCheckLimits
from rekindle.recovery.node_check.verdicts import Health, NodeVerdict, verdicts
from rekindle.training.node_check import serving, torch_checker
from rekindle.training.node_check.torch_checker import TorchKit

VOLTAGE = RuntimeError(
    "Stress detect error. Error code is 574007. Error message is Voltage recovery failed."
)
NO_MEMORY = RuntimeError("NPU out of memory. Tried to allocate 10.00 GiB")
SECONDS = {Measurement.COMPUTE: 1.0, Measurement.MEMORY: 1.0}


class Npu(types.SimpleNamespace):
    """A substitute for torch_npu's module, with a stress_detect that gives a set answer."""

    def __init__(self, answer: int | RuntimeError) -> None:
        super().__init__(is_available=lambda: True, set_device=lambda device: None)
        self.asked = 0
        self.answer = answer

    def stress_detect(self, detect_type: str = "aic") -> int:
        self.asked += 1
        if isinstance(self.answer, RuntimeError):
            raise self.answer
        return self.answer


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | RuntimeError], Npu]:
    """Return a function that installs a simulated, healthy NPU with a given stress_detect."""
    monkeypatch.setattr(torch_checker, "alone", lambda bench: SECONDS)

    def pretend(answer: int | RuntimeError) -> Npu:
        module = Npu(answer)
        monkeypatch.setattr(torch, "npu", module, raising=False)
        return module

    return pretend


def done(*, beside_ranks: bool = False) -> Done:
    """Return the checker's message to its agent."""
    task = DeviceWork(serial=3, beside_ranks=beside_ranks)
    try:
        return simulated_kit().work(task)
    except RuntimeError as error:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "_exit", lambda status: None)
            serving._fail(theirs, task.serial, error)
            return msgspec.msgpack.decode(ours.recv(1 << 16), type=Done)


def simulated_kit() -> TorchKit:
    with pytest.MonkeyPatch.context() as patch:
        # A torch build without NPU support cannot name an NPU device.
        patch.setattr(torch, "device", lambda *name: types.SimpleNamespace(type=name[0]))
        return TorchKit(0)


def judged(answer: Done) -> NodeVerdict:
    """Return the verdict on a node with this answer in each round, next to two healthy nodes."""
    evidence = Evidence(range(3))
    for node in range(3):
        own = Alone(error=answer.error, seconds=answer.seconds, note=answer.note)
        for _ in range(2):
            evidence.add(own if node == 0 else Alone(seconds=SECONDS), node)
    return verdicts(evidence, NodeCheckLimits())[0]


@pytest.mark.parametrize(
    ("answer", "health", "text"),
    [
        (0, Health.HEALTHY, ""),
        (1, Health.HEALTHY, "stress_detect did not run (it returned 1)"),
        (3, Health.HEALTHY, "stress_detect did not run (it returned 3)"),
        (2, Health.FAULTY, "stress_detect of NPU 0 finds its hardware faulty"),
        (VOLTAGE, Health.FAULTY, "Voltage recovery failed"),
        (NO_MEMORY, Health.UNKNOWN, "NPU out of memory"),
    ],
)
def test_what_its_answers_mean(
    answer: int | RuntimeError,
    health: Health,
    text: str,
    install: Callable[[int | RuntimeError], Npu],
) -> None:
    """Only the answer 2 and hardware errors make a node faulty.

    The reason has other failures to run.
    """
    npu = install(answer)
    verdict = judged(done())
    assert npu.asked == 1
    assert verdict.health is health
    assert text in verdict.reason if text else not verdict.reason


@pytest.mark.parametrize("answer", [1, 2, VOLTAGE])
def test_it_is_left_out_beside_ranks(
    answer: int | RuntimeError, install: Callable[[int | RuntimeError], Npu]
) -> None:
    """stress_detect does not run next to ranks: it needs 10 GB and changes the NPU's voltage."""
    npu = install(answer)
    assert done(beside_ranks=True) == Done(serial=3, seconds=SECONDS)
    assert npu.asked == 0
