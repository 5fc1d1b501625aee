"""`mindio_ttp.controller_ttp`: what a controller would be told. The job's coordinator decides.

Who starts a controller is told that all is well; nothing listens at its port. What MindCluster
would have it do is refused as MindIO refuses what it cannot do: with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rekindle.errors import SessionError
from rekindle.training.mindio.handlers import for_mindspore

_REFUSED = 1


def tft_init_controller(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Do nothing. Raises SessionError: what is asked for is not there."""
    refuse_unsupported(local_copy=enable_local_copy, arf=enable_arf, zit=enable_zit)


def tft_start_controller(
    bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = ""
) -> None:
    """Do nothing."""


def tft_destroy_controller() -> None:
    """Do nothing."""


def tft_query_high_availability_switch() -> bool:
    """Whether MindCluster may lead recoveries: never here."""
    return False


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """MindCluster's side would be told of faults by it; there is none who tells."""
    return _refuse(f"to register {action}")


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Refuse."""
    return _refuse("to stop training")


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """Refuse."""
    return _refuse("to take faults of all ranks")


def tft_notify_controller_prepare_action(
    action: str, fault_ranks: dict[int, int] | None = None
) -> int:
    """Refuse."""
    return _refuse(f"to prepare {action}")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Refuse."""
    return _refuse(f"to recover by {strategy}")


def tft_notify_controller_dump() -> int:
    """Refuse."""
    return _refuse("to save a checkpoint")


def refuse_unsupported(*, local_copy: bool, arf: bool, zit: bool) -> None:
    """Raises SessionError: it is switched on, and MindIO alone can do it."""
    asked = {
        "a local copy of the optimizer's state (enable_local_copy)": local_copy,
        "new processes among MindSpore's old ones (enable_arf, ARF:1)": arf and for_mindspore(),
        "a world that shrinks and grows (enable_zit)": zit,
    }
    for what, is_on in asked.items():
        if is_on:
            raise SessionError(
                f"{what} needs MindIO itself; without it switch that off: Rekindle starts the "
                "ranks anew where a process is lost"
            )


def _refuse(what: str) -> int:
    print(f"rekindle: mindio_ttp was told {what}; the job's coordinator decides", file=sys.stderr)
    return _REFUSED
