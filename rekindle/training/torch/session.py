"""Session: a data-parallel training loop whose processes survive the faults of their peers.

The script keeps its own loop. The Session forms the process group of each generation, and wraps the
model in DDP on request. It sets the state to the step from which all ranks continue, and yields the
next step.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

import torch

from rekindle.errors import SessionError
from rekindle.rank import environment as rank_environment
from rekindle.rank.member import Recovery
from rekindle.rank.progress import phase_of
from rekindle.training.sampler import StepSampler
from rekindle.training.torch.arguments import Arguments
from rekindle.training.torch.epochs import Block, Epochs
from rekindle.training.torch.groups.ddp import DistributedDataParallel
from rekindle.training.torch.groups.script_groups import given_to_init, timeout_of
from rekindle.training.torch.guard import Guard
from rekindle.training.torch.loop import Loop, Step

T = TypeVar("T")
_COUNTERS = ("enumerate", "zip", "islice")


class Session:
    """Keeps one rank's training alive.

    model: the module itself, on its device, or Rekindle's DistributedDataParallel around it, which
        means `ddp` with its arguments.
    optimizer: the optimizer of the model's parameters.
    scheduler: a learning rate scheduler, or another object with state_dict() and
        load_state_dict(). The script calls its step().
    sampler: selects the samples of each step, `step.indices`; its position is part of the state.
    loader: gives the batch of each step, `step.batch`; its position is part of the state. It is a
        DataLoader over a StepSampler or an ElasticStream, or a loader with a state of its own.
    ddp: whether the Session wraps the model in DistributedDataParallel; a mapping gives its keyword
        arguments. Use `session.model` in the loop. Without `ddp` the script all-reduces its
        gradients itself, and builds the same weights on every rank: nothing is sent at the start.
    extra: more objects to keep, by name: objects with state_dict() and load_state_dict(), and
        tensors, generators, NumPy arrays, lists, dicts, sets and deques, which are filled in place.
    backend: backend of torch.distributed; default: that of init(), otherwise nccl for a model on a
        GPU, hccl on an NPU, gloo on a CPU.
    seed: seed of the random streams of each step and rank.
    timeout_s: time limit of a collective, as in torch; default: that of init(), otherwise 600 s.
    transient: exceptions after which all ranks repeat the step, such as those of a data source.
    keep_global_batch: whether a step takes as many samples in a shrunk world as in the full one.
        The script then loops over `step.parts()`. Otherwise the ranks keep their batch size, and a
        step takes fewer samples.
    shard: number of the piece of the state that this rank holds, if the ranks hold different
        pieces. Ranks with the same number hold the same bits. With fully_shard() the Session finds
        the number on its own.
    make_groups: called in each generation after its default process group is formed. Call
        dist.new_group() there, and create the objects that depend on it.
    on_recovery: called with a Recovery before and after each recovery, between two steps. All ranks
        wait for it. Its errors are errors of the script.
    ignore: objects with a state that the Session does not keep, although training changes them. In
        its first steps a job ends with a SessionError if such an object is not listed here.
    per_rank: as `extra`, for objects whose state differs between the ranks, such as an environment.
        A replaced rank gets its own state of them again, and that of another rank of all others.
        The running statistics of BatchNorm need no declaration.
    guard: skips steps whose update would damage the model, on all ranks. None: no step is skipped.

    rank, world_size: rank and size of the world of this generation. They may change between steps.
    slot, full_world: rank and size of the full world. They never change.

    Without an agent (a script that a user starts directly), a Session trains in the same way but
    recovers nothing.
    """

    def __init__(  # noqa: PLR0913  the training objects of a script, each by its name
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        sampler: StepSampler | None = None,
        loader: Any = None,
        ddp: bool | Mapping[str, Any] = False,
        extra: Mapping[str, Any] | None = None,
        backend: str | None = None,
        seed: int = 0,
        timeout_s: float | None = None,
        transient: tuple[type[Exception], ...] = (),
        keep_global_batch: bool = False,
        shard: int | None = None,
        make_groups: Callable[[], None] | None = None,
        on_recovery: Callable[[Recovery], object] | None = None,
        ignore: Sequence[Any] = (),
        per_rank: Mapping[str, Any] | None = None,
        guard: Guard | None = None,
    ) -> None:
        wrapper = model if isinstance(model, DistributedDataParallel) else None
        self._loop = Loop(
            Arguments(
                model=model if wrapper is None else wrapper.module,
                optimizer=optimizer,
                scheduler=scheduler,
                sampler=sampler,
                loader=loader,
                ddp=ddp,
                extra=extra or {},
                backend=backend or given_to_init().backend,
                seed=seed,
                timeout_s=timeout_of(timeout_s),
                transient=transient,
                keep_global_batch=keep_global_batch,
                shard=shard,
                make_groups=make_groups,
                on_recovery=on_recovery,
                ignore=ignore,
                per_rank=per_rank or {},
                wrapper=wrapper,
                guard=guard,
            )
        )
        self._epochs = Epochs(self._loop)

    @property
    def model(self) -> torch.nn.Module:
        """The module to call in the loop: the DDP wrapper of this generation, if there is one.

        If the Session has got a DistributedDataParallel, it is that one in each generation.
        """
        wrapper = self._loop.given.wrapper
        return self._loop.generations.model if wrapper is None else wrapper

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter."""
        return self._loop.generations.device

    @property
    def rank(self) -> int:
        """The rank in the world of this generation."""
        return self._loop.generations.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in this generation."""
        return self._loop.generations.world_size

    @property
    def slot(self) -> int:
        """The rank in the full world."""
        return self._loop.generations.slot

    @property
    def full_world(self) -> int:
        """The number of ranks in the full world."""
        return self._loop.generations.full_world

    @property
    def generation(self) -> int:
        """The number of this generation; 0 without an agent."""
        return self._loop.generation

    @property
    def finished(self) -> int:
        """The finished steps of the whole run."""
        return self._loop.state.finished

    @property
    def first_start(self) -> bool:
        """Whether this process is the first of its rank in the job: nothing has run before it.

        It is False in a process that replaces another one, after a restart, and in a later run of
        the same job. Code that empties a folder or writes a header belongs below it. The variable
        REKINDLE_FIRST_START has the same value before the Session exists.
        """
        return rank_environment.is_first_start()

    def __enter__(self) -> Session:
        """Meet the other ranks and take the state from which training continues."""
        self._loop.begin()
        self._epochs.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the process group. An exception of the script passes through."""
        if kind is None:
            self._epochs.end()
        self._loop.end(raised=kind is not None)

    def steps(self, total: int) -> Iterator[Step]:
        """Yield the remaining steps of `total`. After a fault the broken step is repeated.

        total: steps of the whole run, including the steps before a restart.
        """
        for number in self._loop.steps(total):
            yield Step(self._loop, number)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of `total`, from 0.

        total: epochs of the whole run, including those before a restart. Use `batches` in each.
        Raises SessionError: the Session has a sampler or loader of its own.
        """
        return self._epochs.epochs(total)

    def batches(self, loader: Iterable[T], *, numbered: bool = False) -> Iterator[Any]:
        """Yield the remaining batches of this epoch, in the order that the loader itself gives.

        A new process continues with the batch at which the other ranks are.
        numbered: yield pairs of the batch's number in its epoch and the batch.
        Raises SessionError: the loader's order cannot be the same in a new process, a batch has had
        no block, or the loop counts batches itself with enumerate().
        """
        _check_not_counted(sys._getframe(1))
        return self._epochs.batches(loader, numbered=numbered)

    def step(self) -> Block:
        """Return the block of the present batch: `with session.step() as step:`

        A fault repeats this block, and nothing else. All collectives of the batch are inside.
        Raises SessionError: there is no batch, or it has had its block.
        """
        return self._epochs.step()

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function on all ranks, between two blocks, and return its result.

        After a fault in it, all ranks call it again, with the state from before it. No rank returns
        before all ranks have finished it. A new process may get the result of the other ranks.
        Raises SessionError: the function updates parameters, or a state cannot hold its result.
        """
        return self._epochs.run(function, args, kwargs)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Mark work that takes longer than a step: `with session.phase("evaluate"):`

        name: `evaluate`, `checkpoint` or `compile`. The watchdog allows more time for it than for a
        step. Ranks that wait during this time do not count as hung.
        Raises SessionError: another name.
        """
        return self._loop.progress.at(phase_of(name))


def _check_not_counted(frame: FrameType) -> None:
    """Check the expression in which a frame calls session.batches().

    Raises SessionError: it counts the batches. A new process would count from 0 again.
    """
    line, source = frame.f_lineno, linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(source))
    except (SyntaxError, ValueError):  # the file has changed, or has no source
        return
    for call in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name in _COUNTERS and call.lineno <= line <= (call.end_lineno or call.lineno):
            inner = (each for one in call.args for each in ast.walk(one))
            if any(isinstance(each, ast.Attribute) and each.attr == "batches" for each in inner):
                raise SessionError(
                    f"{name}(session.batches(loader)) counts from 0 again in a new process: write "
                    "`for number, batch in session.batches(loader, numbered=True):`"
                )
