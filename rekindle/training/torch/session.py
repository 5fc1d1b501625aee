"""Session: a data-parallel training loop whose processes survive the faults of their peers.

The script keeps its own loop. The Session forms the process group of each generation, wraps the
model in DDP on request, brings the state to the step that all ranks continue from, and yields the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from rekindle.rank.progress import phase_of
from rekindle.training.data.sampler import StepSampler
from rekindle.training.torch.arguments import Arguments
from rekindle.training.torch.loop import Loop
from rekindle.training.torch.step import Step


class Session:
    """Keeps one rank's training alive.

    model: the module itself, not a DDP wrapper. scheduler: anything with state_dict().
    sampler: decides each step's samples; its position is part of the state.
    loader: gives each step's batch, `step.batch`; its position is part of the state. A DataLoader
        over a StepSampler or an ElasticStream, or a loader with a state of its own.
    ddp: wrap the model in DistributedDataParallel; a mapping gives its keyword arguments. Use
        `session.model` in the loop. Without it the script all-reduces its gradients itself.
    extra: more state to keep, by name: objects with state_dict() and load_state_dict().
    backend: of torch.distributed; default: nccl for a model on a GPU, hccl on an NPU, else gloo.
    seed: of the random streams of every step and rank. timeout_s: of collectives, as torch's.
    shard: which piece of the state this rank holds, where not all hold the same (of a model of
        fully_shard() it is seen): ranks of one number have states that are alike bit for bit.
    make_groups: called in each generation when its default process group is there: the place for
        dist.new_group() and what depends on it.
    transient: exceptions after which a step is simply done again (a data source that hiccups).
    keep_global_batch: a step takes as many samples in a world that has shrunk as in the full one:
        loop over `step.parts()`. Else the ranks keep their batch size, and a step takes fewer.

    rank, world_size: the place in the world of this generation, which may change between steps.
    slot, full_world: the same in the full world; they never change.

    Started by hand, without an agent, a Session trains the same way but recovers nothing.
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
        timeout_s: float = 600.0,
        transient: tuple[type[Exception], ...] = (),
        keep_global_batch: bool = False,
        shard: int | None = None,
        make_groups: Callable[[], None] | None = None,
    ) -> None:
        self._loop = Loop(
            Arguments(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                sampler=sampler,
                loader=loader,
                ddp=ddp,
                extra=extra or {},
                backend=backend,
                seed=seed,
                timeout_s=timeout_s,
                transient=transient,
                keep_global_batch=keep_global_batch,
                shard=shard,
                make_groups=make_groups,
            )
        )

    @property
    def model(self) -> torch.nn.Module:
        """The module to call in the loop: the DDP wrapper of this generation, if there is one."""
        return self._loop.generations.model

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

    def __enter__(self) -> Session:
        """Meet the other ranks and take the state that training continues from."""
        self._loop.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the process group. An exception of the script passes through."""
        self._loop.end(raised=kind is not None)

    def steps(self, total: int) -> Iterator[Step]:
        """Yield the steps that are left of `total`. A step that a fault broke comes again.

        total: steps of the whole run, also of those done before a restart.
        """
        for number in self._loop.steps(total):
            yield Step(self._loop, number)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Mark work that takes longer than a step: `with session.phase("evaluate"):`

        name: evaluate, checkpoint or compile. The watchdog allows more time for it than for a
        step, and ranks that wait meanwhile do not count as hung.
        Raises SessionError: another name.
        """
        return self._loop.progress.at(phase_of(name))
