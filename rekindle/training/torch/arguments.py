"""The arguments of a Session, and the checks that refuse unusable ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader

from rekindle import names
from rekindle.errors import SessionError
from rekindle.rank import environment as rank_environment
from rekindle.rank.member import Recovery
from rekindle.training.sampler import StepSampler
from rekindle.training.torch.groups.ddp import DistributedDataParallel, check_options
from rekindle.training.torch.groups.script_groups import in_placeholder, is_zero, local_optimizer
from rekindle.training.torch.guard import Guard
from rekindle.training.torch.private import uncompiled
from rekindle.training.torch.state.capture import PARTS
from rekindle.training.torch.state.plain_objects import is_stateful, stateful
from rekindle.training.torch.state.statistics import REMEDY, STATISTICS, Found, find


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a Session, which describes them, with checks that refuse unusable ones."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    sampler: StepSampler | None
    loader: Any
    ddp: bool | Mapping[str, Any]
    extra: Mapping[str, Any]
    backend: str | None
    seed: int
    timeout_s: float
    transient: tuple[type[Exception], ...]
    keep_global_batch: bool
    shard: int | None
    make_groups: Callable[[], None] | None
    on_recovery: Callable[[Recovery], object] | None = None
    ignore: Sequence[Any] = ()
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    wrapper: DistributedDataParallel | None = None
    guard: Guard | None = None

    def check(self) -> None:
        """Check model and optimizer. Raises SessionError, with the correct use in its text."""
        if isinstance(self.model, TorchDDP):
            raise SessionError(
                "model is a DDP wrapper of torch, which belongs to one generation; import "
                "DistributedDataParallel from rekindle.training.torch instead of "
                "torch.nn.parallel, or give Session the module itself: "
                "Session(model=module, ddp=True) wraps it, and session.model is the wrapper"
            )
        if any(
            isinstance(part, TorchDDP | DistributedDataParallel) for part in self.model.modules()
        ):
            raise SessionError(
                f"model is a {type(self.model).__name__} around a DistributedDataParallel; wrap "
                "the other way: DistributedDataParallel(torch.compile(module))"
            )
        check_options(self.ddp_options() or {})
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise SessionError(
                f"optimizer is a {type(self.optimizer).__name__}, not a torch.optim.Optimizer; "
                "Session needs to detect when the optimizer begins to change the parameters"
            )
        if self.sampler is not None and not isinstance(self.sampler, StepSampler):
            raise SessionError(
                f"sampler is a {type(self.sampler).__name__}, not a StepSampler; give the loader "
                "to session.batches(loader) in session.epochs(), or use StepSampler(samples, "
                "batch_size), which gives each rank the samples of a step"
            )
        if self.scheduler is not None and not is_stateful(self.scheduler):
            raise SessionError(
                f"scheduler is a {type(self.scheduler).__name__}, which has no state_dict() and "
                "load_state_dict(); give it these methods"
            )
        if dist.is_initialized() and not in_placeholder():
            raise SessionError(
                "the default process group exists already, but Session forms it again in each "
                "generation; replace init_process_group by rekindle.training.torch.init, which "
                "takes the same arguments, or remove it from the script"
            )

    def check_parts(self, sampler: StepSampler | None) -> None:
        """Check a kept global batch. Raises SessionError: other arguments do not allow it.

        sampler: the given one, or the loader's.
        """
        if sampler is None:
            raise SessionError(
                "keep_global_batch=True: give Session a StepSampler, or a loader that uses one"
            )
        if isinstance(self.ddp, Mapping) and self.ddp.get("static_graph"):
            # Its first backward pass must synchronise: without that torch 2.13 fails its own
            # assertion.
            raise SessionError(
                "keep_global_batch=True: DistributedDataParallel(static_graph=True) cannot add up "
                "gradients before it all-reduces them; leave static_graph out"
            )

    @property
    def may_have_epochs(self) -> bool:
        """Whether the script may have a loop over epochs."""
        own = self.sampler is not None or self.loader is not None
        return not (own or self.keep_global_batch or self.per_rank)

    def check_epochs(self, *, alone: bool) -> None:
        """Check a loop over epochs. alone: ranks have a state that they share with no other.

        Raises SessionError: this loop does not keep such a state, or another argument has its own
        batches.
        """
        if rank_environment.number(names.ENV_SHRINKS) == 1:
            raise SessionError(
                "session.epochs(): the world may shrink (--nnodes MIN:MAX), but the order of a "
                "loader belongs to one world size; give one number of nodes, --nnodes N, or use "
                "session.steps(total) with a StepSampler"
            )
        for name in ("sampler", "loader", "keep_global_batch"):
            if getattr(self, name):
                raise SessionError(
                    f"session.epochs(): leave {name} out of Session(...); give the loader to "
                    "session.batches(loader), or use session.steps(total)"
                )
        if self.guard is not None:
            raise SessionError(
                "session.epochs(): leave guard out of Session(...), because this loop skips no "
                "batch; or use session.steps(total)"
            )
        if self.per_rank:
            raise SessionError(
                "session.epochs(): leave per_rank out of Session(...), because this loop does not "
                "keep objects that differ between ranks; or use session.steps(total)"
            )
        if alone:
            raise SessionError(
                f"session.epochs() does not keep the {STATISTICS}, which differ between ranks: use "
                f"session.steps(total), {REMEDY}"
            )

    def check_shard(self, shard: int | None) -> None:
        """Check a sharded state. Raises SessionError: other arguments do not allow shards.

        shard: the given one, or the one that the Session found.
        """
        if shard is None:
            return
        if not isinstance(shard, int) or isinstance(shard, bool) or shard < 0:
            raise SessionError(
                f"shard is {shard!r}; give the number of a piece of the state, at least 0"
            )
        ddp = self.ddp and not is_zero(self.optimizer)
        if ddp or self.keep_global_batch:
            wanted = "ddp" if ddp else "keep_global_batch"
            raise SessionError(
                f"{wanted} needs the complete state on every rank, but shard={shard} means that "
                "this rank has only a piece of it; leave one of them out"
            )

    def objects(self) -> list[Any]:
        """Return the given objects whose own state, or that of objects in them, is kept.

        The dataset of a plain DataLoader is none of them: a StepSampler counts only its samples.
        """
        loader = None if type(self.loader) is DataLoader else self.loader
        outer = [] if self.wrapper is None else [self.wrapper]
        given = (*self.extra.values(), *self.per_rank.values())
        return [self.model, *outer, self.optimizer, self.scheduler, loader, *given]

    def named(self, of_data: Mapping[str, Any]) -> dict[str, Any]:
        """Return all objects whose state is kept, by name, without those that are None.

        of_data: the sampler's or loader's parts.
        Raises SessionError: a name in `extra` is already the name of another kept object, or the
        object cannot be kept.
        """
        own = {
            "model": uncompiled(self.model),
            "optimizer": local_optimizer(self.optimizer),
            "scheduler": self.scheduler,
            "guard": self.guard,
            **of_data,
        }
        for argument, given in (("extra", self.extra), ("per_rank", self.per_rank)):
            for name in given:
                if own.get(name) is not None or name == PARTS:
                    raise SessionError(
                        f"{argument}: Session uses the name {name!r} itself; choose another one"
                    )
        if twice := sorted(self.extra.keys() & self.per_rank.keys()):
            raise SessionError(f"{twice[0]!r} is in extra and in per_rank; leave it out of one")
        every = {**own, **self.extra}
        return {
            name: stateful(name, each) if name in self.extra else each
            for name, each in every.items()
            if each is not None
        }

    def of_one_rank(self) -> dict[str, Any]:
        """Return the objects of `per_rank`, by name. Raises SessionError: one cannot be kept."""
        return {n: stateful(n, each, argument=PARTS) for n, each in self.per_rank.items()}

    def statistics(self) -> Found:
        """Return the modules with running statistics that the script has not declared."""
        others = self.extra.values()
        return find(self.model, others, known=self.known, ddp=self.ddp_options())

    @property
    def known(self) -> tuple[Any, ...]:
        """The objects that the script has declared as not shared by all ranks."""
        return (*self.per_rank.values(), *self.ignore)

    def ddp_options(self) -> dict[str, Any] | None:
        """Return the keyword arguments of torch's DDP; None: there is no wrapper.

        Raises SessionError: the script gives them twice.
        """
        if self.wrapper is not None:
            if isinstance(self.ddp, Mapping):
                raise SessionError(
                    "ddp: the model is a DistributedDataParallel already; give its arguments there"
                )
            return dict(self.wrapper.options)
        if isinstance(self.ddp, Mapping):
            return dict(self.ddp)
        return {} if self.ddp else None
