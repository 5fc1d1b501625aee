"""`tft_exception_handler`: call a training function again once its fault is repaired.

It serves the adaptors of Megatron and MindSpeed, whose training runs on torch. It loads neither.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from typing import Any

from rekindle.training.mindio import framework, update_times
from rekindle.training.mindio.enums import Action, ReportState
from rekindle.training.mindio.handlers import loaded_npu

_CODE = re.compile(r"\bdevice error type\s*([0-9a-fA-F]+)\b", re.IGNORECASE)
_OTHER = "OTHER"
_REPAIRABLE, _CORRUPTED = "HBM MULTI BIT ECC can repair", "HBM MULTI BIT ECC can't repair"
_LINKS = ("HCCL OP RETRY FAILED", "SUSPECT REMOTE ERROR", "UB LINK ERROR", "HCCS LINK ERROR")
_WORDS = ("FORCE STOP", "ARF FINISH", "STEP FINISH")

_states = {
    "UCE ERROR": "RS_UCE",
    _REPAIRABLE: "RS_UCE",
    _CORRUPTED: "RS_UCE_CORRUPTED",
    "FORCE STOP": "RS_NORMAL",
    "ARF FINISH": "RS_PREREPAIR_FINISH",
    "STEP FINISH": "RS_STEP_FINISH",
    **dict.fromkeys(_LINKS, "RS_HCCL_FAILED"),
    _OTHER: "RS_UNKNOWN",
}


def tft_register_exception_handler(
    fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]
) -> None:
    """Map errors whose text contains the pattern to a ReportState.

    fault_handle: gets the error's text, and returns the pattern or another pattern that replaces
    it.
    """
    _handles[fault_pattern] = fault_handle
    _states[fault_pattern] = fault_type


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that repairs the rank after a fault and calls `func` again.

    If the fault cannot be repaired, the function raises an error.
    Raises TypeError: `func` cannot be called.
    """
    if not callable(func):
        raise TypeError(f"tft_exception_handler() takes a function, not {func!r}")

    @functools.wraps(func)
    def train(*args: Any, **kwargs: Any) -> Any:
        # a list: handlers may replace arguments for the next call
        arguments = args if framework.get_mindio_export_version() else list(args)
        framework.handlers.arguments = arguments
        while True:
            try:
                result = func(*arguments, **kwargs)
                framework.tft_destroy_processor()
                return result
            except RuntimeError as error:
                text = str(error)
                if not _stop_for(text):
                    raise
            except Exception:
                framework.tft_report_error(ReportState.RS_UNKNOWN)
                raise
            # Outside of the except block, because its traceback keeps tensors alive.
            _release_memory()
            if framework.tft_wait_repair_action() != Action.RETRY.value:
                raise RuntimeError(f"could not be repaired: {text}")
            _release_memory()

    return train


def state_of(text: str) -> ReportState:
    """Return the ReportState for an error with this text.

    A registered pattern may be any part of the text. The own ones begin with a word: "REDUCE ERROR"
    is not "UCE ERROR".
    """
    for pattern, handle in _handles.items():
        border = r"(?<!\w)" if pattern in _OWN else ""
        if re.search(border + re.escape(pattern), text):
            return ReportState[_states[handle(text)]]
    return ReportState.RS_UNKNOWN


def _stop_for(text: str) -> bool:
    """Report an error, and wait until the device is clean; False: no repair is possible."""
    found = _CODE.search(text)
    state = state_of(text)
    framework.tft_report_error(state, found.group(1) if found else "")
    if state is ReportState.RS_UNKNOWN:
        return False
    return framework.tft_wait_next_action() == Action.RETRY.value


def _release_memory() -> None:
    """Free the memory of the broken step, so that repair and training have enough."""
    gc.collect()
    if (npu := loaded_npu()) is not None:
        npu.empty_cache()


def _of_memory(text: str) -> str:
    if not framework.repairs_memory:
        return _OTHER
    time_us = update_times.error_time_us(text)
    return _REPAIRABLE if update_times.tft_can_do_uce_repair(time_us) else _CORRUPTED


def _if_repairs(pattern: str) -> Callable[[str], str]:
    return lambda _: pattern if framework.repairs_memory else _OTHER


# The first pattern that the error's text contains decides.
_handles: dict[str, Callable[[str], str]] = {
    "UCE ERROR": _if_repairs("UCE ERROR"),
    "HBM MULTI BIT ECC": _of_memory,
    **{pattern: lambda _, same=pattern: same for pattern in _WORDS},  # type: ignore[misc]
    **{pattern: _if_repairs(pattern) for pattern in _LINKS},
}
_OWN = frozenset(_handles)
