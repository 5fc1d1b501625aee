"""`tft_exception_handler`: the states of errors, and the next call of the training function."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rekindle.errors import SessionError
from rekindle.training.mindio import exception_handler, framework, update_times
from rekindle.training.mindio.enums import ReportState
from rekindle.training.mindio.handlers import Handlers


class Rank:
    """A processor that records its calls in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.repairs, self.joins_running_ranks = True, False

    def report(self, state: ReportState, code: str, error: BaseException | None) -> None:
        self.done.append((state.name, code, str(error)))

    def wait_clean(self) -> bool:
        self.done.append("clean")
        return True

    def wait_repaired(self) -> bool:
        self.done.append("repaired")
        return self.repairs

    def end(self) -> None:
        self.done.append("end")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Replace the process's processor with a recording one, and reset the handlers of errors."""
    made = Rank()
    monkeypatch.setattr(framework, "_processor", made)
    monkeypatch.setattr(update_times, "_times", {})
    handles, states = dict(exception_handler._handles), dict(exception_handler._states)
    monkeypatch.setattr(exception_handler, "_handles", handles)
    monkeypatch.setattr(exception_handler, "_states", states)
    return made


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("... UCE ERROR ...", "RS_UCE"),
        ("HBM MULTI BIT ECC ERROR, time us=150", "RS_UCE"),
        ("HBM MULTI BIT ECC ERROR, time us=350", "RS_UCE"),
        ("HBM MULTI BIT ECC ERROR, time us=50", "RS_UCE_CORRUPTED"),
        ("HBM MULTI BIT ECC ERROR", "RS_UCE_CORRUPTED"),
        ("FORCE STOP. By somebody", "RS_NORMAL"),
        ("ARF FINISH", "RS_PREREPAIR_FINISH"),
        ("STEP FINISH", "RS_STEP_FINISH"),
        ("HCCL OP RETRY FAILED", "RS_HCCL_FAILED"),
        ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED"),
        ("UB LINK ERROR", "RS_HCCL_FAILED"),
        ("HCCS LINK ERROR", "RS_HCCL_FAILED"),
        ("something else", "RS_UNKNOWN"),
        ("a REDUCE ERROR of the script", "RS_UNKNOWN"),
    ],
)
def test_an_error_s_text_says_what_it_is(rank: Rank, text: str, state: str) -> None:
    """The error's text determines the state that the rank reports.

    An update ran from 100 to 200. A memory error during the update or after it can be repaired.
    """
    update_times.tft_set_update_start_time(100)
    update_times.tft_set_update_end_time(200)
    assert exception_handler.state_of(text).name == state


def test_without_repair_of_memory_such_errors_are_the_script_s(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enable_uce=False, errors of memory and links count as the script's own, as in MindIO."""
    monkeypatch.setattr(framework, "repairs_memory", False)
    for text in ("UCE ERROR", "HBM MULTI BIT ECC", "HCCL OP RETRY FAILED"):
        assert exception_handler.state_of(text) is ReportState.RS_UNKNOWN
    assert exception_handler.state_of("FORCE STOP") is ReportState.RS_NORMAL


def test_training_is_entered_anew_after_each_fault(rank: Rank) -> None:
    """After each fault, the rank calls the function again, with the arguments of the handlers.

    When the function returns, the rank ends.
    """
    errors = [RuntimeError("UCE ERROR, device error type 1A2b."), RuntimeError("FORCE STOP")]

    @exception_handler.tft_exception_handler
    def train(start: int, *, name: str) -> tuple[int, str]:
        if errors:
            framework.handlers.arguments[0] += 1
            raise errors.pop(0)
        return start, name

    assert train(5, name="it") == (7, "it")
    assert train.__name__ == "train"
    assert rank.done == [
        ("RS_UCE", "1A2b", "UCE ERROR, device error type 1A2b."),
        *("clean", "repaired"),
        ("RS_NORMAL", "", "FORCE STOP"),
        *("clean", "repaired", "end"),
    ]


def test_what_is_no_fault_of_a_device_is_raised(rank: Rank) -> None:
    """If an error is not a fault of a device, the rank reports it and raises it without a wait."""

    @exception_handler.tft_exception_handler
    def train(error: Exception) -> None:
        raise error

    for error in (RuntimeError("mine"), ValueError("mine")):
        with pytest.raises(type(error), match=r"^mine$"):
            train(error)
    assert rank.done == [("RS_UNKNOWN", "", "mine")] * 2


def test_what_cannot_be_repaired_is_raised(rank: Rank) -> None:
    """If a repair fails, the rank raises an error with the fault's text, for the agent."""
    rank.repairs = False

    @exception_handler.tft_exception_handler
    def train() -> None:
        raise RuntimeError("UCE ERROR of a rank")

    with pytest.raises(RuntimeError, match="could not be repaired: UCE ERROR of a rank"):
        train()


def test_a_framework_s_own_errors_can_be_told_apart(rank: Rank) -> None:
    """A framework can register a pattern, its state, and a function that gets the error's text.

    MindSpeed registers its errors in this way.
    """
    seen = []

    def handle(text: str) -> str:
        seen.append(text)
        return "PRECISION ERROR"

    exception_handler.tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", handle)
    assert exception_handler.state_of("a PRECISION ERROR") is ReportState.RS_RETRY
    assert exception_handler.state_of("IMPRECISION ERROR") is ReportState.RS_RETRY
    assert seen == ["a PRECISION ERROR", "IMPRECISION ERROR"]


def test_what_is_not_there_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions refuse features of MindIO that Rekindle lacks, such as a hot switch."""
    with pytest.raises(SessionError, match="RS_STEP_FINISH: a hot switch needs MindIO itself"):
        framework.tft_report_error(ReportState.RS_STEP_FINISH)
    for name in ("enable_local_copy", "enable_zit"):
        arguments: dict[str, Any] = {"enable_local_copy": False, name: True}
        with pytest.raises(SessionError, match=f"only MindIO itself supports .*{name}"):
            framework.tft_init_controller(0, 2, **arguments)
    framework.tft_init_controller(0, 2, False, enable_arf=True)
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    with pytest.raises(SessionError, match=r"only MindIO itself supports .*MindSpore.*ARF:1"):
        framework.tft_init_controller(0, 2, False, enable_arf=True)


def test_only_a_process_that_joins_others_says_so(rank: Rank) -> None:
    """Only a process that joins other ranks can report RS_INIT_FINISH and RS_PREREPAIR_FINISH.

    `tft_is_reboot_node()` is true for such a process only.
    """
    assert not framework.tft_is_reboot_node()
    for state in ("RS_INIT_FINISH", "RS_PREREPAIR_FINISH"):
        with pytest.raises(SessionError, match=f"{state}: this process does not join other ranks"):
            framework.tft_report_error(ReportState[state].value)
    rank.joins_running_ranks = True
    assert framework.tft_is_reboot_node()
    framework.tft_report_error(ReportState.RS_PREREPAIR_FINISH)
    assert [done[0] for done in rank.done] == ["RS_PREREPAIR_FINISH"]


@pytest.mark.process
def test_a_thread_that_stops_the_device_uses_the_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that stops the device selects the device of the thread that initialized the rank.

    torch has a current device per thread. A second tft_init_processor() raises SessionError.
    """
    used = threading.local()
    npu = types.SimpleNamespace(
        current_device=lambda: getattr(used, "device", 0),
        set_device=lambda device: setattr(used, "device", device),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(npu=npu))
    monkeypatch.setattr(framework, "handlers", Handlers())
    monkeypatch.setattr(framework, "_processor", None)
    npu.set_device(3)
    framework.tft_init_processor(0, 2, False, False, "")
    seen = []
    register = framework.registering["tft_register_stop_handler"]
    register(lambda args, ctx: seen.append(npu.current_device()))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(npu.current_device).result() == 0
        pool.submit(framework.handlers.stop).result()
    assert (seen, framework.get_device()) == ([3], 3)
    framework.current().generations.gate.leave()
    with pytest.raises(SessionError, match="must be called only once"):
        framework.tft_init_processor(0, 2, False, False, "")


@pytest.mark.parametrize("variable", ["", "0", "False", "1", "true"])
def test_mindspore_waits_for_all_at_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """With MindSpore, the first wait lasts until the device is clean and the state is repaired.

    With another framework, the second wait is for the repair.
    """
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", variable)
    assert framework.tft_wait_next_action() == 0
    assert rank.done == (["clean", "repaired"] if variable in ("1", "true") else ["clean"])
    rank.repairs = False
    assert framework.tft_wait_repair_action() == 1
