"""MindSpore's errors of devices and links, and the repair of a rank after one of them.

MindSpore raises a plain RuntimeError for each; only the text names the fault. Its C++ code
(ErrorHandler, 2.10) has these texts only if MS_ENABLE_TFT has UCE:1 or HCCE:1. The functions that
stop, clean and repair an Ascend device are those that MindSpore gives to MindIO.
"""

from __future__ import annotations

import operator
import os
import re
import sys
import threading
import traceback
from types import SimpleNamespace
from typing import Any, Protocol

import mindspore

from rekindle.console import say
from rekindle.rank.member import UnusableError
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.mindio.handlers import OK, UNHARMED
from rekindle.training.mindio.update_times import tft_can_do_uce_repair
from rekindle.training.mindspore.state import Parameters
from rekindle.waiting import until

UPDATE_S = 30.0  # MindIO waits for the same time until an update ends
LOOK_S = 0.01  # between two looks whether it has ended
_TEXT = re.compile(
    r"\b(UCEError|HCCEError|SuspectRemoteError|ForceStopError) (?:error )?occurs when execute"
)
_MULTI_BIT = "error_code=507054"  # HBM multi-bit ECC, which a device may report late
_SWITCH = "MS_ENABLE_TFT"


def kind_of(error: RuntimeError) -> FaultKind | None:
    """Return the kind of fault that MindSpore reports; None: it is another error."""
    found = _TEXT.search(str(error)) if type(error) is RuntimeError else None
    if found is None:
        return None
    return FaultKind.DEVICE_MEMORY if found[1] == "UCEError" else FaultKind.LINK


def spread(error: RuntimeError) -> bool:
    """Return whether a memory error may have reached the states of all ranks.

    Gradients from before the newest update went to all ranks.
    """
    if _MULTI_BIT not in str(error):
        return False
    return not tft_can_do_uce_repair(*mindspore._c_expression._get_optimzer_timestamps())


class GraphStep:
    """The step whose graph the main thread runs, and whether its update has begun.

    running: the main thread runs the graph. Another thread reads it.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._begun: tuple[int, ...] | None = None
        self._open = False
        self.running = False

    def begin(self) -> None:
        """Record that the graph is about to run."""
        self._begun = self._parameters.begun
        self._open = self.running = True

    def end(self) -> None:
        """Record that the graph has run."""
        self._open = self.running = False

    @property
    def updated(self) -> bool:
        """Whether the graph runs, and all its optimizers are known to have begun their updates.

        An optimizer that is not `recoverable` does not show that its update has begun.
        """
        if not self.running or self._begun is None:
            return False
        return all(map(operator.ne, self._parameters.begun or self._begun, self._begun))

    @property
    def updates(self) -> bool:
        """Whether the graph runs and may have begun an update."""
        return self.running and self._moved

    def undo(self) -> bool:
        """Restore what a broken graph has changed; False: the state belongs to no step."""
        was_open, self._open = self._open, False
        if not was_open:
            return True
        if self._moved or not self._parameters.are_as_before:
            return False
        self._parameters.restore()
        return True

    @property
    def _moved(self) -> bool:
        return self._begun is None or self._parameters.begun != self._begun


class Device(Protocol):
    """One rank's device.

    interrupts: whether it can stop a collective in which not all ranks take part.
    """

    interrupts: bool

    def finish(self) -> None:
        """Wait until the device has run the graph. Raises RuntimeError: it could not."""

    def stop(self, step: GraphStep) -> None:
        """Stop the device's work. The channel's thread calls this."""

    def clean(self, *, damaged: bool, broken: bool) -> bool:
        """Make the device usable again; return whether the state is unharmed.

        damaged: its memory had an error. broken: this rank's graph raised an error.
        Raises UnusableError: only a new process can use it.
        """


class CpuDevice:
    """The host's CPU, which runs a graph at once.

    A graph that raised an error must be compiled again.
    """

    interrupts = False

    def __init__(self, network: mindspore.nn.Cell) -> None:
        self._network = network

    def finish(self) -> None:
        """Do nothing: a call of the graph returns after the graph's end."""

    def stop(self, step: GraphStep) -> None:
        """Do nothing: the graph of each healthy rank ends."""

    def clean(self, *, damaged: bool, broken: bool) -> bool:
        """Forget a broken graph."""
        if broken:
            self._network.compile_cache.clear()
        return not damaged


class AscendDevice:
    """An NPU. Written against MindSpore 2.10; never run on one."""

    interrupts = True

    def __init__(self) -> None:
        from mindspore.train.callback import _train_fault_tolerance

        self._native = _train_fault_tolerance
        self._number = int(mindspore.get_context("device_id"))
        self._thread: threading.Thread | None = None
        self._failed = False
        if "UCE:1" not in os.environ.get(_SWITCH, ""):
            say(
                f"{_SWITCH} does not have UCE:1, so MindSpore does not name memory errors and all "
                f"ranks restart after one; set {_SWITCH}='{{UCE:1, HCCE:1}}' before the start"
            )

    def finish(self) -> None:
        """Wait for all streams. Only a loss that is a single number waits without this."""
        mindspore.runtime.synchronize()

    def stop(self, step: GraphStep) -> None:
        """Abort all tasks, once a running update has ended."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(step,), name="rekindle-device-stop", daemon=True
            )
            self._thread.start()

    def clean(self, *, damaged: bool, broken: bool) -> bool:
        """Clean the queues, resume HCCL, and repair damaged memory."""
        if self._thread is None:
            return not damaged
        self._thread.join()
        self._thread = None
        answer = None if self._failed else self._native._tft_clean_callback(damaged, None, self._as)
        if answer not in (OK, UNHARMED):
            raise UnusableError("MindSpore's handlers could not stop and clean the NPU")
        if damaged:
            mindspore._c_expression._repair_device(self._number)
        mindspore._c_expression._reset_error_state()
        return not damaged or answer == UNHARMED

    def _run(self, step: GraphStep) -> None:
        until(lambda: not step.updates, UPDATE_S, LOOK_S)
        try:
            self._native._tft_stop_callback(None, self._as)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            self._failed = True

    @property
    def _as(self) -> Any:
        """A callback with the attributes that MindSpore's handlers read. It has no parameters."""
        repair = SimpleNamespace(tft_get_repair_type=lambda: "retry")
        return SimpleNamespace(device_id=self._number, is_uce_rank=True, tft=repair)


def device_for(network: mindspore.nn.Cell) -> Device:
    """Return the adapter for the device on which a network trains."""
    if mindspore.get_context("device_target") == "Ascend":
        return AscendDevice()
    return CpuDevice(network)
