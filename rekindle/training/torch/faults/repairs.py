"""The faults of a rank's steps: those that are injected, their errors, and the repair after one.

An injected fault that breaks the process or its node occurs as the step begins (`rekindle inject`).
An injected exception comes from inside the step's body, like a real one: when the model's forward
pass begins, or after the optimizer's update.

The repair concerns the device, the state from before the step, and the list of clean updates.
"""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rekindle.errors import SessionError, StaleError
from rekindle.protocol.agent import Inject, InjectionKind
from rekindle.protocol.heartbeat_page import HeartbeatPage
from rekindle.rank.error_origin import causes_of, chain_of, is_of_script, is_raised_by_script
from rekindle.rank.injection import break_process, due
from rekindle.rank.member import UnusableError, text_of
from rekindle.rank.progress import CurrentStep
from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.devices import Damage, device_for
from rekindle.training.torch.groups.generation_group import Group
from rekindle.training.torch.guard import Guard
from rekindle.training.torch.state.before_step import BeforeStep
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.statistics import SharedStatistics
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
# torch's texts for a group that has been destroyed, in a collective and in get_group_rank().
_OLD_GROUP = re.compile(
    r"is not initialized in the world group map|is not registered, please create group with"
    r"|Invalid process group specified"
)
# The SIGCHLD handler of torch raises such an error anywhere in the main thread.
_LOST_WORKER = re.compile(r"^DataLoader worker \(pid")
_RAISERS = ("torch", "torch_npu")  # packages whose subclasses of RuntimeError also count
_ERROR = re.compile(r"HBM MULTI BIT ECC", re.IGNORECASE)
# torch-npu 2.14 writes "time is <us>"; MindIO searches for "time us=<us>". Other errors in the same
# text have other times, in other units.
_TIME = re.compile(_ERROR.pattern + r"[^\n]*?time (?:is|us\s*=)\s*(\d+)", re.IGNORECASE)
_KEPT = 1024  # updates; a report of an error comes at most this many updates later

_RAISED: dict[InjectionKind, Callable[[str], Exception]] = {
    InjectionKind.EXCEPTION: lambda text: RuntimeError(f"an exception was {text}"),
    InjectionKind.OOM: lambda text: torch.OutOfMemoryError(f"out of memory was {text}"),
    InjectionKind.UCE: lambda text: RuntimeError(f"UCE ERROR {text}"),
    InjectionKind.TORN_UPDATE: lambda text: RuntimeError(f"UCE ERROR {text} inside the update"),
}


def inject(
    faults: list[Inject], step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Inject those of `faults` that are due in `step`, and remove them from the list."""
    for fault, text in due(faults, step):
        match fault.kind:
            case InjectionKind.HANG_COLLECTIVE:
                _wait_for_nobody(next((p.device for p in model.parameters()), torch.device("cpu")))
            case InjectionKind.HANG_DATA:
                _wait_for_data()
            case InjectionKind.TORN_UPDATE:
                _once(optimizer.register_step_post_hook, _RAISED[fault.kind](text))
            case _ if not break_process(fault):
                _once(model.register_forward_pre_hook, _RAISED[fault.kind](text))


def _wait_for_nobody(device: torch.device) -> None:
    """Receive from the next rank, which sends nothing: it waits for this rank in a collective."""
    received = torch.empty(1, device=device)
    dist.recv(received, src=(dist.get_rank() + 1) % dist.get_world_size())
    received.item()  # a GPU only queues the receive before this call


def _wait_for_data() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Dry(Dataset[int]):
        """A data set whose source gives nothing."""

        def __getitem__(self, index: int) -> int:
            os.read(os.pipe()[0], 1)
            return index

        def __len__(self) -> int:
            return 1

    next(iter(DataLoader(Dry(), num_workers=1)))


def _once(register: Callable[..., torch.utils.hooks.RemovableHandle], error: Exception) -> None:
    def strike(*_: object) -> None:
        handle.remove()
        raise error

    handle = register(strike)


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
    """Raises SessionError: the script uses torch in a way that no repetition changes."""
    if any(_OLD_GROUP.search(str(each)) for each in chain_of(error)):
        raise SessionError(
            "the script uses a process group of an earlier generation: all groups end when a rank "
            "is replaced. Use the default group (group=None), or create the group, and each object "
            "that holds one (a pipeline schedule, a hook's state), in the function make_groups="
        ) from error
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
    """The device of one rank, and its state from before a step, across generations.

    kind: the fault that ended the generation, if this rank knows it.
    valid_steps: StepFailed's value for that fault, until the rank has another state.
    times: the start times of its updates.
    before: the state from before the step.
    """

    def __init__(self, device: torch.device, before: BeforeStep, step: CurrentStep) -> None:
        self.device = device_for(device)
        self.times = UpdateTimes(self.device.clock_us)
        self.before = before
        self.kind = FaultKind.LINK
        self.valid_steps: int | None = None
        self.step = step
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

        restores: the update has not begun, so the rest of the state returns to that before the
        broken step. The state is incomplete if a part of it has changed and has no copy.
        Raises UnusableError: only a new process can use the device again.
        """
        kind, self.kind = self.kind, FaultKind.LINK
        in_step = self.step.take_broken()
        try:
            damage = self.device.repair(kind, lambda: list(capture(named).tensors.values()))
            if in_step and restores and damage is Damage.NONE and not self.before.restore():
                damage = Damage.STATE
        except Exception as error:
            self.note(FaultKind.DEVICE, error)
            raise UnusableError(text_of(error)) from error
        if damage is Damage.DEVICE:
            raise UnusableError(f"this process cannot use {self._name} again")
        return damage is Damage.NONE


class StepGradients:
    """Finds gradients that a script adds up over several steps; a recovery would lose them.

    A step with such gradients begins with those of the step before, and its backward pass adds to
    them. This looks for it in the second step of a generation, and in each step that follows one
    without an update. Other steps have no hooks.
    """

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        self._due = False
        self._first = True
        self._old: dict[torch.Tensor, torch.Tensor] = {}  # by parameter: the step before has it
        self._added: set[torch.Tensor] = set()  # the parameters whose old gradient has grown
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the parameters of this optimizer, too."""
        self._optimizers.append(optimizer)

    def reset(self) -> None:
        """Begin a generation: its first step has no gradients of an earlier one."""
        self._clear()
        self._first, self._due = True, False

    def begin_step(self) -> None:
        """Look at the gradients that the step before has left, if it is due."""
        if not self._due:
            return
        for optimizer in self._optimizers:
            for parameter in _parameters_of(optimizer):
                if parameter.grad is not None and parameter.requires_grad:
                    self._old[parameter] = parameter.grad
                    arrives = functools.partial(self._arrives, parameter)
                    self._hooks.append(parameter.register_hook(arrives))

    def end_step(self, *, updated: bool) -> None:
        """End a step. updated: an update has begun in it. Raises as check() does."""
        if self._hooks:
            if not updated:
                self._refuse(self._added)
            self._clear()
        self._due = self._first or not updated
        self._first = False

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the gradients of an update.

        Raises SessionError: they contain those of an earlier step.
        """
        if self._added:
            self._refuse(_parameters_of(optimizer))

    def _arrives(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        """Look at the gradient to which the backward pass is about to add."""
        old = self._old.get(parameter)
        if old is None or (old.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if parameter.grad is old and bool(old.any()):
            self._added.add(parameter)
        else:  # the script has reset it in this step
            del self._old[parameter]
            self._added.discard(parameter)

    def _refuse(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            grown = parameter.grad if parameter in self._added else None
            if grown is not None and grown is self._old[parameter] and bool(grown.any()):
                raise SessionError(
                    "this step adds to the gradients of the step before, but gradients are not "
                    "part of the state, and a recovery would lose them. Do all micro-batches of an "
                    "update in one `with step:` block, or call optimizer.zero_grad() in each step"
                )

    def _clear(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._old, self._added = [], {}, set()


class Updates:
    """Marks the update on the heartbeat page. Its gradients must be real, and of this step alone.

    together: no rank begins its update before all ranks have their gradients. Otherwise a sharded
    state loses a step that one shard's ranks have done and another shard's ranks could not. It
    needs an all-reduce of one number per step. An NPU uses it too, so an error that its wait for
    gradients raises loses no step. group: the ranks of this rank's generation. guard: decides
    which steps are skipped. statistics: what rank 0 sends before an update.
    """

    guard: Guard | None = None

    def __init__(
        self, page: HeartbeatPage, repairs: Repairs, group: Group, *, together: bool
    ) -> None:
        self.group = group
        self._page = page
        self._device = repairs.device
        self._times = repairs.times
        self._before = repairs.before
        self._together = together
        self.gradients = StepGradients()
        self.statistics = SharedStatistics(())
        self._step = repairs.step
        self._groups: dict[torch.optim.Optimizer, int] = {}  # with the number of parameter groups
        self.open = False  # the ranks train: an update outside of a step belongs to no state

    def watch(self, named: Mapping[str, Any]) -> None:
        """Register a hook in every optimizer among these objects: it runs when an update begins."""
        for thing in named.values():
            if isinstance(thing, torch.optim.Optimizer):
                thing.register_step_pre_hook(lambda optimizer, *_: self._begin(optimizer))
                self.gradients.watch(thing)
                self._groups[thing] = len(thing.param_groups)

    def end_step(self) -> None:
        """Check a finished step before it counts. Raises SessionError, with the remedy."""
        self.gradients.end_step(updated=self._page.in_update)
        self.statistics.end_step()
        for optimizer, count in self._groups.items():
            if (now := len(optimizer.param_groups)) != count:
                raise SessionError(
                    f"the optimizer had {count} parameter groups when the Session began, and has "
                    f"{now}. A replaced rank has only the first ones. Give it all groups before "
                    "the Session, with lr=0 in those that begin later, and set their lr in a step"
                )

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the gradients are real, and not those of a severed group; mark the update.

        An accelerator's collectives do not block the host, and raise nothing when they are aborted.
        """
        if self.open and not self._step.is_under_way:
            raise SessionError(
                "optimizer.step() ran outside of `with step:`. A replaced rank would not do this "
                "update, because it belongs to no step. Do it inside the block, or after the "
                "end of the `with Session` block"
            )
        if self.open:
            self.statistics.share()
        self._device.wait()
        if self.group.severed:
            raise StaleError("the generation ended before the update")
        if self._together and not self._page.in_update:
            have = torch.ones(1, device=wire_device())
            dist.all_reduce(have)
            if int(have.item()) != dist.get_world_size():
                raise StaleError("the generation ended while the ranks met for the update")
        self.gradients.check(optimizer)
        if self.guard is not None:
            self.guard.check(optimizer, first=not self._page.in_update)
        if not self._page.in_update:
            self._before.update_begins()
        self._times.begin((self._page.finished or 0) + 1)
        self._page.begin_update()


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
