"""Call the handlers that a framework has registered, with MindIO's arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

OK, ERROR, UNHARMED = 0, 1, 2  # answers of a clean handler
_NEVER = "Never called: the world keeps its size."
# Each kind of handler, with its arguments and the moment of the call.
KINDS = {
    "save_ckpt": "func(step, save_info, args, ctx): on one rank of each node, when the job ends.",
    "rename": "func(step, args), of MindSpore func(step, ctx): after save_ckpt.",
    "exit": "func(ctx): after rename.",
    "stop": "func(args, ctx), in another thread than the training's.",
    "clean": "func(is_uce_error, args, ctx) -> 0: clean, 1: not, 2: clean, and the state unharmed.",
    "repair": "func(step, need_rebuild, error_ranks, repair_info, args, ctx).",
    "rollback": "func(step, args, ctx): after the repair, on all ranks.",
    "rebuild_group": "func(fault_ranks, args, ctx): on all ranks, when processes have joined, "
    "before a repair.",
    "stream_sync": "func(): before training is held between two steps.",
    "zit_upgrade_rollback": _NEVER,
    "zit_upgrade_repair": _NEVER,
    "zit_upgrade_rebuild": _NEVER,
    "zit_downgrade_rebuild": _NEVER,
}


class RepairCall(NamedTuple):
    """The first arguments of a repair handler; the arguments of its registration follow."""

    step: int
    need_rebuild: bool
    error_ranks: list[int]
    repair_info: dict[str, Any]


class Handlers:
    """Hold at most one handler of each kind; a call of a missing handler does nothing.

    arguments: set by the training loop; most handlers get them. device: the rank's device.
    """

    def __init__(self) -> None:
        self._registered: dict[str, tuple[Callable[..., Any], Any]] = {}
        self.arguments: Any = None
        self.device: int | None = None

    def register(self, kind: str, func: Callable[..., Any], ctx: Any) -> None:
        """Register a handler. Raises TypeError: it cannot be called."""
        if not callable(func):
            raise TypeError(f"the {kind} handler must be callable, not {func!r}")
        self._registered[kind] = func, ctx

    def has(self, kind: str) -> bool:
        """Return whether a handler of this kind is registered."""
        return kind in self._registered

    def stop(self) -> None:
        """Stop the device's work; a separate thread calls this."""
        self._use_device()
        self._call("stop", self.arguments)

    def clean(self, is_uce_error: bool) -> int:
        """Make the device usable again; return OK, ERROR or UNHARMED."""
        answer = self._call("clean", is_uce_error, self.arguments)
        return OK if answer is None else int(answer)

    def repair(self, call: RepairCall) -> None:
        """Send the state, or receive it from the rank that the call names."""
        self._call("repair", *call, self.arguments)

    def rebuild_group(self, fault_ranks: list[int]) -> None:
        """Form all groups again, together with the ranks whose processes are new."""
        self._call("rebuild_group", fault_ranks, self.arguments)

    def rollback(self, step: int) -> None:
        """Reset the rest to that step: data, counters."""
        self._call("rollback", step, self.arguments)

    def save(self, step: int, save_info: Sequence[dict[str, Any]]) -> None:
        """Save a checkpoint, because training ends here; a separate thread calls this."""
        self._use_device()
        self._call("save_ckpt", step, list(save_info), self.arguments)

    def rename(self, step: int) -> None:
        """Give the saved checkpoint its final name."""
        if "rename" in self._registered:
            func, ctx = self._registered["rename"]
            func(step, ctx if for_mindspore() else self.arguments)

    def exit(self) -> None:
        """End the process."""
        self._call("exit")

    def sync_stream(self) -> None:
        """Wait for all tasks of the device."""
        if "stream_sync" in self._registered:
            self._registered["stream_sync"][0]()

    def _use_device(self) -> None:
        """Select the rank's device: torch gives each new thread the first device."""
        if self.device is not None and (npu := loaded_npu()) is not None:
            npu.set_device(self.device)

    def _call(self, kind: str, *arguments: Any) -> Any:
        if kind not in self._registered:
            return None
        func, ctx = self._registered[kind]
        return func(*arguments, ctx)


def for_mindspore() -> bool:
    """Return whether MindSpore trains; MindIO reads the same variable."""
    return os.environ.get("MINDIO_FOR_MINDSPORE", "").lower() in ("true", "1")


def loaded_npu() -> Any:
    """Return torch's module of NPUs; None: this process has not loaded torch-npu."""
    return getattr(sys.modules.get("torch"), "npu", None)
