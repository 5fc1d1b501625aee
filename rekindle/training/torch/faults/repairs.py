"""The faults of a rank's steps: which errors report one, and the repair of the rank after it.

The repair concerns the device, the module's buffers, and the list of clean updates.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rekindle.errors import SessionError, StaleError
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.error_origin import causes_of, chain_of, is_of_script, is_raised_by_script
from rekindle.rank.member import UnusableError, text_of
from rekindle.rank.progress import CurrentStep
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.devices import Damage, device_for
from rekindle.training.torch import private
from rekindle.training.torch.groups.generation_group import Group
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.transfer import wire_device

# Texts of RuntimeErrors. Each is a phrase of the library that raises it, so that a script's own
# text does not match. Ascend: the texts of torch-npu 2.14, which MindIO TFT also uses
# (`tft_exception_handler`), and the codes of HCCL (EI0006). NVIDIA: torch's text for
# cudaErrorECCUncorrectable. Gloo names its source file and line; NCCL and HCCL name themselves.
_TEXTS = {
    FaultKind.DEVICE_MEMORY: (
        r"(?-i:UCE ERROR|HBM MULTI BIT ECC|SUSPECT MEM ERROR)|uncorrectable ECC error",
    ),
    FaultKind.LINK: (
        r"(?-i:HCCL OP RETRY FAILED|SUSPECT REMOTE ERROR|(?:UB|HCCS) LINK ERROR|FORCE STOP)",
        r"gloo/[\w/]+\.(?:cc|h):\d+\]",
        r"Gloo connectFullMesh failed|failed to pass monitoredBarrier",
        r"NCCL error|NCCL communicator was aborted|collective operation timeout",
        r"HCCL error in|HCCL function error|call hccl api failed|Hccl\w+, error code is",
        # CANN: time-outs of notify wait, sockets and RDMA; its other codes are about arguments.
        r"EI00(?:02|06|12|13)\b|operator name is Hccl\w+",
        r"timed out in blocking wait",
    ),
}
_PATTERNS = {
    kind: re.compile("|".join(rf"\b(?:{text})(?!\w)" for text in texts), re.IGNORECASE)
    for kind, texts in _TEXTS.items()
}
# Gloo's texts for errors that a script causes: wrong arguments of a collective, which gloo checks
# outside of its transport; different sizes of the ranks; a missing interface.
_ARGUMENTS = re.compile(
    r"\[enforce fail at \S*\bgloo/(?!gloo/|transport/|rendezvous/)"
    r"|gloo/\S+\] (?:op\.preamble|ifa != )"
)
# The SIGCHLD handler of torch raises such an error anywhere in the main thread.
_LOST_WORKER = re.compile(r"^DataLoader worker \(pid")
_RAISERS = ("torch", "torch_npu")  # packages whose subclasses of RuntimeError also count
_ERROR = re.compile(r"HBM MULTI BIT ECC", re.IGNORECASE)
# torch-npu 2.14 writes "time is <us>"; MindIO searches for "time us=<us>". Other errors in the same
# text have other times, in other units.
_TIME = re.compile(_ERROR.pattern + r"[^\n]*?time (?:is|us\s*=)\s*(\d+)", re.IGNORECASE)
_KEPT = 1024  # updates; a report of an error comes at most this many updates later


def kind_of(error: BaseException, transient: tuple[type[Exception], ...] = ()) -> FaultKind | None:
    """Return the kind of fault that `error` reports; None: it is the script's own error.

    The type decides first. Text counts only in RuntimeErrors that a library raised, and not in a
    script's subclasses of it. A system error inside a script's own error also counts, unless the
    script's error is of a type for mistakes in a program and does not name its cause.

    transient: exceptions after which the script wants to repeat the step. An exception inside a
    script's own error does not count as one.
    """
    ours = isinstance(error, SessionError)  # it reports an error of the script
    found = set() if ours else {_kind_of_one(each) for each in causes_of(error)}
    for kind in (FaultKind.DEVICE_MEMORY, FaultKind.LINK):
        if kind in found:
            return kind
    return FaultKind.TRANSIENT if isinstance(error, transient) else None


def check_use(error: BaseException) -> None:
    """Raises SessionError: the script gives one GPU to two ranks, which no repetition changes."""
    if "Duplicate GPU detected" in str(error):  # NCCL's text
        raise SessionError(
            "two ranks use the same GPU, and NCCL allows one rank per GPU: call "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the model is made, and '
            'start one rank per GPU (--nproc-per-node gpu), or use Session(backend="gloo")'
        ) from error


def may_come_from_peers(error: BaseException, *, accelerator: bool) -> bool:
    """Return whether an error that is not known as a fault may be the result of a peer's failure.

    It may be if the script raised it while it handled a fault. An accelerator can also report a
    peer's failure with an unknown text, but never as a lack of memory or a lost worker.
    """
    if any(_kind_of_one(each) for each in chain_of(error)):
        return True
    unknown = isinstance(error, RuntimeError) and not (
        isinstance(error, torch.OutOfMemoryError) or _LOST_WORKER.match(str(error))
    )
    return accelerator and unknown and not is_of_script(error)


def _kind_of_one(error: BaseException) -> FaultKind | None:
    package, _, rest = type(error).__module__.partition(".")
    raised_by_library = type(error) is RuntimeError and not is_raised_by_script(error)
    of_torch = package in _RAISERS and not rest.startswith("_dynamo")  # it quotes the script
    if raised_by_library or (isinstance(error, RuntimeError) and of_torch):
        if _ARGUMENTS.search(str(error)):
            return None
        for kind, pattern in _PATTERNS.items():
            if pattern.search(str(error)):
                return kind
    return FaultKind.LINK if isinstance(error, (dist.DistError, StaleError)) else None


class BufferGuard:
    """Keeps a copy of a module's buffers that change.

    It copies constant buffers (masks, tables) once: their version counters never change. It copies
    the buffers of normalisations at every call, because torch's kernels write them without
    counting. It copies all buffers on a device at every call, because the replay of a CUDA graph
    does not count.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._places: list[tuple[dict[str, torch.Tensor | None], str, bool]] = []
        self._kept: dict[int, _Kept] = {}  # by the number of the place

    def look(self) -> None:
        """Find the module's buffers; once per generation, because it visits all modules."""
        self._places = [
            (private.buffers_of(part), name, isinstance(part, private.NormBase))
            for part in self._module.modules()
            for name in private.buffers_of(part)
        ]
        self._kept = {}

    def keep(self) -> None:
        """Keep the buffers' current values."""
        changed: list[_Kept] = []
        for index, (place, name, uncounted) in enumerate(self._places):
            buffer, kept = place[name], self._kept.get(index)
            if buffer is None:
                continue
            if kept is None or buffer is not kept.buffer:
                version = private.version_of(buffer)
                self._kept[index] = _Kept(buffer, buffer.detach().clone(), version)
            elif kept.may_differ(uncounted=uncounted):
                kept.version = private.version_of(buffer)
                changed.append(kept)
        if changed:
            with torch.no_grad():  # one call: for small buffers, calls take longer than the bytes
                private.copy_all([kept.copy for kept in changed], [kept.buffer for kept in changed])

    def restore(self) -> None:
        """Restore the kept values."""
        for index, kept in self._kept.items():
            place, name, uncounted = self._places[index]
            place[name] = kept.buffer
            if kept.may_differ(uncounted=uncounted):
                with torch.no_grad():
                    kept.buffer.copy_(kept.copy)
                kept.version = private.version_of(kept.buffer)


@dataclass(slots=True)
class _Kept:
    """A buffer, a copy of its values, and its version counter at the time of the copy."""

    buffer: torch.Tensor
    copy: torch.Tensor
    version: int

    def may_differ(self, *, uncounted: bool) -> bool:
        """Return whether the buffer may have changed since the copy."""
        if uncounted or not self.buffer.is_cpu:
            return True
        return private.version_of(self.buffer) != self.version


class UpdateTimes:
    """The start times of the updates that led to this rank's state: (finished step, microseconds).

    clock_us: the clock that the device's errors use.
    """

    def __init__(self, clock_us: Callable[[], int]) -> None:
        self._clock_us = clock_us
        self._began: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._least: int | None = None  # an older state contains no work of this process

    def begin(self, step: int) -> None:
        """Record the start of the update that finishes `step`, or of an optimizer's part of it."""
        self._drop_from(step)
        self._began.append((step, self._clock_us()))

    def at(self, step: int) -> None:
        """Record that the rank has the state of `step`: without an update, or a received one."""
        self._drop_from(step + 1)
        self._least = step if self._least is None else min(step, self._least)
        if not self._began or self._began[-1][0] < step:
            self._began.append((step, self._clock_us()))

    def _drop_from(self, step: int) -> None:
        while self._began and self._began[-1][0] >= step:
            self._began.pop()

    def valid_steps_after(self, error: BaseException) -> int | None:
        """Return the newest certainly correct step; None: the error damages no finished step.

        It may be this rank's newest step. A peer may have done one more step with its gradients.
        """
        text = str(error)
        if not _ERROR.search(text) or not self._began:
            return None
        times_us = [int(found) for found in _TIME.findall(text)]
        if times_us:
            right = [step for step, at_us in self._began if at_us < min(times_us)]
            newest = right[-1] if right else self._began[0][0] - 1
        else:
            newest = self._began[-1][0] - 1  # the error may be older than the newest update
        return max(newest, self._least or 0)


class Repairs:
    """The device and the module's buffers of one rank, across generations.

    kind: the fault that ended the generation, if this rank knows it.
    valid_steps: StepFailed's value for that fault, until the rank has another state.
    times: the start times of its updates.
    step: a step that broke off may have changed the module's buffers.
    """

    def __init__(self, device: torch.device, module: torch.nn.Module, step: CurrentStep) -> None:
        self.device = device_for(device)
        self.times = UpdateTimes(self.device.clock_us)
        self.buffers = BufferGuard(module)
        self.kind = FaultKind.LINK
        self.valid_steps: int | None = None
        self._step = step
        self._name = device

    def note(self, kind: FaultKind, error: BaseException) -> None:
        """Record the fault that ended the generation, and the newest state that it leaves clean."""
        self.kind = kind
        known = [self.valid_steps, *map(self.times.valid_steps_after, chain_of(error))]
        self.valid_steps = min((step for step in known if step is not None), default=None)

    def took_state(self, step: int) -> None:
        """Record that the rank has the plan's state of `step`, which has no damage."""
        self.valid_steps = None
        self.times.at(step)

    def repair(self, named: Mapping[str, Any], *, restores: bool) -> bool:
        """Make the device usable after a generation; return whether its state is complete.

        restores: the state is complete, so the buffers get the values from before the broken step.
        Raises UnusableError: only a new process can use the device again.
        """
        kind, self.kind = self.kind, FaultKind.LINK
        in_step = self._step.take_broken()
        try:
            damage = self.device.repair(kind, lambda: list(capture(named).tensors.values()))
            if in_step and restores and damage is Damage.NONE:
                self.buffers.restore()
        except Exception as error:
            self.note(FaultKind.DEVICE, error)
            raise UnusableError(text_of(error)) from error
        if damage is Damage.DEVICE:
            raise UnusableError(f"this process cannot use {self._name} again")
        return damage is Damage.NONE


class Updates:
    """Marks the update on the heartbeat page, after a check that the update's gradients are real.

    together: no rank begins its update before all ranks have their gradients. A sharded state would
        lose a step that one shard's ranks have done and another shard's ranks could not. With
        `together`, all ranks do it, because an update does not depend on other ranks. It needs an
        all-reduce of one number per step. An NPU uses it too: an error that its wait for gradients
        raises then loses no step.
    group: the ranks of this rank's generation.
    """

    def __init__(
        self, page: HeartbeatPage, repairs: Repairs, group: Group, *, together: bool
    ) -> None:
        self.group = group
        self._page = page
        self._device = repairs.device
        self._times = repairs.times
        self._together = together

    def watch(self, named: Mapping[str, Any]) -> None:
        """Register a hook in every optimizer among these objects: it runs when an update begins."""
        for thing in named.values():
            if isinstance(thing, torch.optim.Optimizer):
                thing.register_step_pre_hook(lambda *_: self._begin())

    def _begin(self) -> None:
        """Check that the gradients are real, and not those of a severed group; mark the update.

        An accelerator's collectives do not block the host, and raise nothing when they are aborted.
        """
        self._device.wait()
        if self.group.severed:
            raise StaleError("the generation ended before the update")
        if self._together and not self._page.in_update:
            have = torch.ones(1, device=wire_device())
            dist.all_reduce(have)
            if int(have.item()) != dist.get_world_size():
                raise StaleError("the generation ended while the ranks met for the update")
        self._times.begin((self._page.finished or 0) + 1)
        self._page.begin_update()
