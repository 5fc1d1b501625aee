"""MindSpore's functions for an NPU, as records of their calls: a job on CPU uses AscendDevice.

What an NPU would do itself has a substitute. The graph that raised an error is compiled again. The
text `at us=<n>` of an error gives the time of a memory error; the newest update lasted from 10 to
20.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mindspore
from mindspore import nn
from mindspore.train.callback import _train_fault_tolerance as native

from rekindle.training.mindspore import session
from rekindle.training.mindspore.faults import AscendDevice

_AT = re.compile(r"at us=(\d+)")


class SimulatedNpu:
    """The calls of one rank, in their order. text: of the newest error.

    wait: called when the rank waits for the NPU.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.calls: list[Any] = []
        self.text = ""

    def install(self) -> None:
        """Replace the functions."""
        manager = SimpleNamespace(resume_hccl_comm=lambda: self.calls.append("resume"))
        mindspore.runtime.synchronize = self._wait
        native._stop_device = lambda number: self.calls.append("stop")
        native._get_uce_mem_info = lambda number: self.calls.append("find")
        native._get_uce_process_strategy = lambda: "RS_UCE_HIGHLEVEL"
        native.clean_tdt_channel = lambda: self.calls.append("clean")
        native.CollectiveManager = SimpleNamespace(get_instance=lambda: manager)
        of_cpp = mindspore._c_expression
        of_cpp._repair_device = lambda number: self.calls.append("repair")
        of_cpp._get_optimzer_timestamps = lambda: [int(_AT.search(self.text)[1]), 10, 20]
        session.device_for = self._device

    def _device(self, network: nn.Cell) -> AscendDevice:
        def reset() -> None:
            self.calls.append("reset")
            network.compile_cache.clear()

        mindspore._c_expression._reset_error_state = reset
        return AscendDevice()
