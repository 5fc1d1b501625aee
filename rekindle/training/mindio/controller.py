"""`mindio_ttp.controller_ttp`: accept or refuse calls; the job's coordinator decides instead.

A process that starts a controller gets no error, but nothing listens at the controller's port.
MindCluster's requests return 1, as MindIO does for a request that it cannot fulfil.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle.console import say
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
    """Do nothing. Raises SessionError: a requested feature does not exist here."""
    refuse_unsupported(local_copy=enable_local_copy, arf=enable_arf, zit=enable_zit)


def tft_start_controller(
    bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = ""
) -> None:
    """Do nothing."""


def tft_destroy_controller() -> None:
    """Do nothing."""


def tft_query_high_availability_switch() -> bool:
    """Return False: MindCluster may not lead recoveries here."""
    return False


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Refuse: MindCluster's callback would receive faults, and nothing here sends them."""
    return _refuse(f"to register {action}")


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Refuse to stop training."""
    return _refuse("to stop training")


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """Refuse the faults of all ranks."""
    return _refuse("to take faults of all ranks")


def tft_notify_controller_prepare_action(
    action: str, fault_ranks: dict[int, int] | None = None
) -> int:
    """Refuse to prepare an action."""
    return _refuse(f"to prepare {action}")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Refuse a strategy."""
    return _refuse(f"to recover by {strategy}")


def tft_notify_controller_dump() -> int:
    """Refuse to save a checkpoint."""
    return _refuse("to save a checkpoint")


def refuse_unsupported(*, local_copy: bool, arf: bool, zit: bool) -> None:
    """Check the features that only MindIO provides. Raises SessionError: one is switched on."""
    asked = {
        "a local copy of the optimizer's state (enable_local_copy)": local_copy,
        "new processes among MindSpore's old ones (enable_arf, ARF:1)": arf and for_mindspore(),
        "a world that shrinks and grows (enable_zit)": zit,
    }
    for what, is_on in asked.items():
        if is_on:
            raise SessionError(
                f"only MindIO itself supports {what}; switch it off, because Rekindle restarts "
                "the ranks of a lost process"
            )


def _refuse(what: str) -> int:
    say(f"the script asked mindio_ttp {what}, but only the job's coordinator decides this")
    return _REFUSED
