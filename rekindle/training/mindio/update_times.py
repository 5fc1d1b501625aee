"""`mindio_ttp.utils`: when the newest update began and ended, by the device's clock.

An error in the device's memory that is told late has spoiled the state if the update took it in.
"""

from __future__ import annotations

import re
import sys

_TIME = re.compile(r"time us=(\d+)")
_times: dict[str, int] = {}


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """The update begins; None: now."""
    _times["start"] = _now_us() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """It has ended."""
    _times["end"] = _now_us() if end_time is None else end_time


def tft_can_do_uce_repair(
    hbm_error_time: int, start_time: int | None = None, end_time: int | None = None
) -> bool:
    """Whether a replica's state is right in spite of an error of this time.

    Without a time, or before any update, nobody knows: no.
    """
    begin = _times.get("start", 0) if start_time is None else start_time
    end = _times.get("end", 0) if end_time is None else end_time
    if not (hbm_error_time and begin and end):
        return False
    return max(begin, end) < hbm_error_time or begin < hbm_error_time < end


def error_time_us(text: str) -> int:
    """The time that an error names; 0: none."""
    found = _TIME.search(text)
    return int(found.group(1)) if found else 0


def _now_us() -> int:
    """By the clock of torch's NPU; 0: there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "npu"):
        return 0
    event = torch.npu.Event(enable_timing=True)
    event.record()
    return int(event.recorded_time()) if hasattr(event, "recorded_time") else 0
