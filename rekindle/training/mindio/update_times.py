"""`mindio_ttp.utils`: record when the newest update began and ended, by the device's clock.

An error in the device's memory may be reported late. It has damaged the state if the update used
the damaged memory.
"""

from __future__ import annotations

import re

from rekindle.training.mindio.handlers import loaded_npu

_TIME = re.compile(r"time us=(\d+)")
_times: dict[str, int] = {}


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Set the time at which the update began; None: now."""
    _times["start"] = _now_us() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Set the time at which the update ended; None: now."""
    _times["end"] = _now_us() if end_time is None else end_time


def tft_can_do_uce_repair(
    hbm_error_time: int, start_time: int | None = None, end_time: int | None = None
) -> bool:
    """Return whether a replica's state is correct despite an error at this time.

    Without a time, or before any update, the answer is False.
    """
    begin = _times.get("start", 0) if start_time is None else start_time
    end = _times.get("end", 0) if end_time is None else end_time
    if not (hbm_error_time and begin and end):
        return False
    return max(begin, end) < hbm_error_time or begin < hbm_error_time < end


def error_time_us(text: str) -> int:
    """Return the time in the text of an error; 0: it has none."""
    found = _TIME.search(text)
    return int(found.group(1)) if found else 0


def _now_us() -> int:
    """Return the time by the clock of torch's NPU, in microseconds; 0: there is no NPU."""
    if (npu := loaded_npu()) is None:
        return 0
    event = npu.Event(enable_timing=True)
    event.record()
    return int(event.recorded_time()) if hasattr(event, "recorded_time") else 0
