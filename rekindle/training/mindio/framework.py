"""`mindio_ttp.framework_ttp`: MindIO's names, upon a Processor.

Signatures are those of MindIO (Ascend/mind-cluster, component/mindio/tft); a test holds them.
`registering` has the functions that register handlers, by their names.
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
from rekindle.training.mindio.handlers import KINDS, Handlers, for_mindspore
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
_framework: str | None = None  # as it has called itself
_world_size = 0
repairs_memory = True  # whether an error in a device's memory is one to repair


def current() -> Processor:
    """Return this rank's. Raises SessionError: tft_init_processor() was not called."""
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
    """This process is a rank. Raises SessionError: not this one, or not like that."""
    global _processor, _world_size, repairs_memory
    if _processor is not None:
        raise SessionError("tft_init_processor() was called before")
    if not 0 <= rank < world_size:
        raise SessionError(f"tft_init_processor(): no rank {rank} in a world of {world_size}")
    refuse_unsupported(local_copy=enable_local_copy, arf=enable_arf, zit=enable_zit)
    _processor = Processor(rank, handlers, Channel.from_environment(), takes_in=enable_arf)
    _world_size, repairs_memory = world_size, enable_uce
    handlers.device = _device()


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Meet the other ranks, through the agent: neither address is used.

    One that joins others does so when it reports RS_PREREPAIR_FINISH.
    """
    current().start()


def tft_destroy_processor() -> None:
    """All steps are done; wait until they are on all ranks.

    Raises RuntimeError, which the training loop takes like any other: another has to go back.
    """
    if _processor is not None:
        _processor.end()


def tft_is_reboot_node() -> bool:
    """Whether it joins others that go on in their processes (ARF)."""
    return current().joins


def tft_get_reboot_type() -> str:
    """How it joins."""
    return "arf"


# ---- training


def tft_start_updating_os(backup_step: int = -1) -> None:
    """The optimizer begins to change the state."""
    current().begin_update()


def tft_start_copy_os() -> None:
    """A local copy is made: of no use here."""


def tft_end_updating_os(step: int) -> None:
    """The state is that of `step` steps."""
    current().end_update(step)


def tft_pause_train(cur_step: int) -> None:
    """Between two steps; raises RuntimeError when training is held there."""
    current().pause()


def tft_reset_limit_step() -> None:
    """A stop handler says that nobody need wait for it; nobody does longer than it runs."""


def tft_set_step_args(args: Any) -> None:
    """What handlers are called with. MindSpeed's are those that it trains with."""
    if args is not None and _framework is None:
        handlers.arguments = args


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> None:
    """Which ranks hold the same optimizer state. Raises SessionError: that is no such thing."""
    current().replicas(replica_info, _world_size)


def tft_set_dp_group_info(rank: int, dp_rank_list: Sequence[int]) -> None:
    """The data-parallel group: of use for a world that shrinks alone."""


def set_mindio_export_version(framework_type: str) -> None:
    """A framework says which it is. Raises SessionError: one that MindIO does not know."""
    global _framework
    if framework_type not in _FRAMEWORKS:
        raise SessionError(f"MindIO knows {' and '.join(_FRAMEWORKS)}, not {framework_type!r}")
    _framework = framework_type


def get_mindio_export_version() -> str | None:
    """What it has said."""
    return _framework


def get_device() -> int | None:
    """The rank's device, by its number; None: tft_init_processor() was not called."""
    return handlers.device


def _device() -> int:
    """The device that this thread uses."""
    if for_mindspore():
        return int(sys.modules["mindspore"].get_context("device_id"))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "npu"):
        return int(torch.npu.current_device())
    return int(os.environ.get("LOCAL_RANK", "0"))


# ---- faults


def tft_report_error(error_type: ReportState | int, error_code: str = "") -> None:
    """Say what has broken off the step, or that a process is ready to join the others.

    Raises SessionError: a state that only MindIO knows; a process that has nobody to join.
    """
    value = error_type.value if isinstance(error_type, ReportState) else error_type
    state = ReportState(value)
    if state is ReportState.RS_STEP_FINISH:
        raise SessionError(f"{state.name}: a hot switch needs MindIO itself")
    if state in _JOINING and not current().joins:
        raise SessionError(f"{state.name}: this process joins nobody (tft_is_reboot_node)")
    current().report(state, error_code, sys.exc_info()[1])


def tft_wait_next_action() -> int:
    """Wait until the device is stopped and clean; of MindSpore, until all is repaired."""
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
    """The step that training goes on from; 0: it never had to."""
    return current().generations.repair_step


def tft_get_repair_type() -> str:
    """What is under way: retry, recover, dump, or unknown."""
    return current().generations.repair_type


def tft_report_load_ckpt_step(step: int) -> None:
    """A repair handler has loaded the checkpoint of this step."""
    current().loaded(step)


# ---- handlers


def tft_register_decrypt_handler(decryptor: Callable[..., Any] | None) -> None:
    """Never called: there is no TLS of MindIO's."""


def _registers(kind: str) -> Callable[..., None]:
    """Return the function that registers a handler of this kind."""

    def register(func: Callable[..., Any], ctx: Any = None) -> None:
        handlers.register(kind, func, ctx)

    register.__doc__ = KINDS[kind]
    return register


registering = {f"tft_register_{kind}_handler": _registers(kind) for kind in KINDS}
