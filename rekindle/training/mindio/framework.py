"""`mindio_ttp.framework_ttp`: MindIO's names, which call a Processor.

The signatures are MindIO's (Ascend/mind-cluster, component/mindio/tft); a test compares them.
`registering` maps the names of the functions that register handlers to the functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle.errors import SessionError
from rekindle.rank.channel import Channel
from rekindle.training.mindio.controller import (
    refuse_unsupported,
    tft_destroy_controller,
    tft_init_controller,
    tft_start_controller,
)
from rekindle.training.mindio.enums import Action, OptimizerType, RepairType, ReportState
from rekindle.training.mindio.handlers import KINDS, Handlers, for_mindspore, loaded_npu
from rekindle.training.mindio.processor import Processor
from rekindle.training.mindio.update_times import tft_can_do_uce_repair

__all__ = [
    "Action",
    "OptimizerType",
    "RepairType",
    "ReportState",
    "tft_can_do_uce_repair",
    "tft_destroy_controller",
    "tft_init_controller",
    "tft_start_controller",
]

_FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")
_JOINING = (ReportState.RS_INIT_FINISH, ReportState.RS_PREREPAIR_FINISH)
handlers = Handlers()
_processor: Processor | None = None
_framework: str | None = None  # the name that the framework has set
_world_size = 0
repairs_memory = True  # whether this rank may repair an error in a device's memory


def current() -> Processor:
    """Return this rank's processor. Raises SessionError: tft_init_processor() was not called."""
    if _processor is None:
        raise SessionError("call tft_init_processor() first")
    return _processor


# ---- a rank's life


def tft_init_processor(  # noqa: PLR0913  # MindIO's signature
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Make this process a rank. Raises SessionError: it is one, or an argument is invalid."""
    global _processor, _world_size, repairs_memory
    if _processor is not None:
        raise SessionError("tft_init_processor() must be called only once")
    if not 0 <= rank < world_size:
        raise SessionError(
            f"tft_init_processor(): a world of {world_size} ranks does not have a rank {rank}"
        )
    refuse_unsupported(local_copy=enable_local_copy, arf=enable_arf, zit=enable_zit)
    _processor = Processor(rank, handlers, Channel.from_environment(), takes_in=enable_arf)
    _world_size, repairs_memory = world_size, enable_uce
    handlers.device = _device()


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Meet the other ranks, through the agent; both addresses are ignored.

    A process that joins running ranks meets them when it reports RS_PREREPAIR_FINISH.
    """
    current().start()


def tft_destroy_processor() -> None:
    """Wait until all ranks have done all steps.

    Raises RuntimeError, which the training loop handles like any other: another rank must go back.
    """
    if _processor is not None:
        _processor.end()


def tft_is_reboot_node() -> bool:
    """Return whether this process joins ranks that continue in their processes (ARF)."""
    return current().joins_running_ranks


def tft_get_reboot_type() -> str:
    """Return how a new process joins: always "arf"."""
    return "arf"


# ---- training


def tft_start_updating_os(backup_step: int = -1) -> None:
    """Record that the optimizer begins to change the state."""
    current().begin_update()


def tft_start_copy_os() -> None:
    """Do nothing: a local copy has no use here."""


def tft_end_updating_os(step: int) -> None:
    """Record that the state includes `step` steps."""
    current().end_update(step)


def tft_pause_train(cur_step: int) -> None:
    """Wait between two steps if the agent holds training. Raises RuntimeError after that wait."""
    current().pause()


def tft_reset_limit_step() -> None:
    """Do nothing: a stop handler reports that waits may end, and waits last only while it runs."""


def tft_set_step_args(args: Any) -> None:
    """Set the arguments of handlers. MindSpeed's handlers get the arguments of its training."""
    if args is not None and _framework is None:
        handlers.arguments = args


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> None:
    """Set the ranks that hold the same optimizer state. Raises SessionError: they are invalid."""
    current().replicas(replica_info, _world_size)


def tft_set_dp_group_info(rank: int, dp_rank_list: Sequence[int]) -> None:
    """Do nothing: only a world that shrinks uses the data-parallel group."""


def set_mindio_export_version(framework_type: str) -> None:
    """Set the framework's name. Raises SessionError: MindIO does not know it."""
    global _framework
    if framework_type not in _FRAMEWORKS:
        raise SessionError(f"MindIO supports {' and '.join(_FRAMEWORKS)}, not {framework_type!r}")
    _framework = framework_type


def get_mindio_export_version() -> str | None:
    """Return the framework's name; None: it was not set."""
    return _framework


def get_device() -> int | None:
    """Return the number of the rank's device; None: tft_init_processor() was not called."""
    return handlers.device


def _device() -> int:
    """Return the number of the device that this thread uses."""
    if for_mindspore():
        return int(sys.modules["mindspore"].get_context("device_id"))
    if (npu := loaded_npu()) is not None:
        return int(npu.current_device())
    return int(os.environ.get("LOCAL_RANK", "0"))


# ---- faults


def tft_report_error(error_type: ReportState | int, error_code: str = "") -> None:
    """Report the error that broke the step, or that a process is ready to join the others.

    Raises SessionError: only MindIO knows the state, or the process has no ranks to join.
    """
    value = error_type.value if isinstance(error_type, ReportState) else error_type
    state = ReportState(value)
    if state is ReportState.RS_STEP_FINISH:
        raise SessionError(f"{state.name}: a hot switch needs MindIO itself")
    if state in _JOINING and not current().joins_running_ranks:
        raise SessionError(
            f"{state.name}: this process does not join other ranks (tft_is_reboot_node)"
        )
    current().report(state, error_code, sys.exc_info()[1])


def tft_wait_next_action() -> int:
    """Wait until the device is stopped and clean; with MindSpore, until all is repaired."""
    good = current().wait_clean()
    if good and for_mindspore():
        good = current().wait_repaired()
    return _answer(good)


def tft_wait_repair_action() -> int:
    """Wait until the state is repaired and rolled back."""
    return _answer(current().wait_repaired())


def _answer(good: bool) -> int:
    return int((Action.RETRY if good else Action.EXIT).value)


def tft_get_repair_step() -> int:
    """Return the step from which training continues; 0: there was no repair."""
    return current().generations.repair_step


def tft_get_repair_type() -> str:
    """Return the recovery that runs: retry, recover, dump, or unknown."""
    return current().generations.repair_type


def tft_report_load_ckpt_step(step: int) -> None:
    """Record that a repair handler has loaded the checkpoint of this step."""
    current().loaded(step)


# ---- handlers


def tft_register_decrypt_handler(decryptor: Callable[..., Any] | None) -> None:
    """Do nothing with the handler: Rekindle does not use MindIO's TLS."""


def _registers(kind: str) -> Callable[..., None]:
    """Return the function that registers a handler of this kind."""

    def register(func: Callable[..., Any], ctx: Any = None) -> None:
        handlers.register(kind, func, ctx)

    register.__doc__ = KINDS[kind]
    return register


registering = {f"tft_register_{kind}_handler": _registers(kind) for kind in KINDS}
