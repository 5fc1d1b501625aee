"""For a state on a GPU, the writer registers the mapped memory of snapshots with CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rekindle.rank.progress import RankPlace
from rekindle.rank.snapshot_writer import Captured
from rekindle.training.torch.state.sharding import GivenValues
from rekindle.training.torch.state.snapshot import PinnedMemory, TorchSnapshotWriter

ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class Cudart:
    """CUDA's functions. registered: sizes by address. answer: the returned error number."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:
        if self.answer == 0:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class OnGpu(torch.Tensor):
    """A tensor that reports that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_snapshot_of_a_gpu_registers_its_buffers(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """The writer registers each buffer of a GPU's state once, and unregisters it when it closes."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    channel: Any = None
    writer = TorchSnapshotWriter(channel, RankPlace(0), values=GivenValues())
    tensor = torch.ones(2).as_subclass(OnGpu) if on_gpu else torch.ones(2)
    state = Captured(b"", {"a": tensor}, (("a", "F32", (2,)),))
    for _ in range(2):
        [view] = writer.views(memoryview(bytearray(64)), state, {"a": 8})
        assert view.shape == (2,)
    assert list(cudart.registered.values()) == ([64, 64] if on_gpu else [])
    writer.close()
    assert cudart.registered == {}


def test_a_refusal_of_cuda_makes_snapshots_slow_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If CUDA refuses a registration, the log has a warning, and the script gets no error.

    CUDA reports a refusal again at the next operation (recorded with torch 2.11 on an H100).
    """

    def refuse(*_: object, **__: object) -> None:
        messages.append("CUDA error: part or all of the requested memory range is already mapped")
        raise RuntimeError(messages[-1])

    messages: list[str] = []
    monkeypatch.setattr(torch, "zeros", refuse)
    pinned = PinnedMemory(Cudart(ALREADY_REGISTERED))
    pinned.add(memoryview(bytearray(64)))
    assert len(messages) == 1  # the script's next operation gets no error
    pinned.release()
    assert "CUDA cannot register 64 bytes (error 712)" in caplog.text
