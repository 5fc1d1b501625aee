"""Wrap a model in DDP for the current generation, with the same order of sums in each generation.

Ring all-reduce sums an element in an order that depends on the element's place in its bucket. Torch
starts with one bucket. After the first backward pass it rebuilds the layout in the order in which
gradients became ready. So a wrapper that is made after a fault would produce other bits than the
wrapper before it. Here the final layout exists from the first step. It does not depend on the time
or the rank at which the wrapper is made.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from rekindle.errors import SessionError
from rekindle.training.torch import private
from rekindle.training.torch.groups import gloo_waits as waits
from rekindle.training.torch.groups.gloo_waits import Hook, reduce_bucket
from rekindle.training.torch.state.transfer import broadcast_tensors

_NO_JOIN = (
    "join() is for ranks with different numbers of batches, but all ranks of a Session do the same "
    "steps; give each rank the same number of batches: DistributedSampler does so, or leave the "
    "last ones out"
)
_SIGNATURE = inspect.signature(TorchDDP.__init__)
_NOT_OPTIONS = ("self", "module")
# The group belongs to the generation, and a wrapper must send nothing while it is made.
_OURS = ("process_group", "device_mesh", "init_sync")
# These add hooks to the user's module that a second initialisation would not remove.
_ONCE_ONLY = ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce")


def wrap_ddp(module: nn.Module, *, existing: TorchDDP | None, **ddp_kwargs: Any) -> TorchDDP:
    """Wrap `module` for the current default process group, without any collective.

    existing: a wrapper of an earlier generation. The function initialises it again in place.
    References to it, its hooks, its communication hook and its mode stay. Gradients are cleared.
    Raises SessionError: DDP refuses an argument or the model, or cannot survive a new generation.
    """
    check_options(ddp_kwargs)
    if existing is None:
        wrapper = SteadyDDP.__new__(SteadyDDP)
    elif isinstance(existing, SteadyDDP):
        wrapper = existing
    else:
        raise SessionError(
            "Rekindle can only renew a wrapper of wrap_ddp; give the module without a wrapper"
        )
    # The next backward pass must not add to the gradients of a broken one. Gradients may also be
    # views of the old buckets, which must be freed before new ones are made.
    module.zero_grad(set_to_none=True)
    comm_hooks = private.take_comm_hooks(wrapper)
    former = wrapper.__dict__.get("process_group")
    wrapper.__dict__.pop("logger", None)
    wrapper.__dict__.pop("reducer", None)  # removes its hooks from the parameters
    SteadyDDP.__init__(wrapper, module, **ddp_kwargs)
    for hook, state in comm_hooks:
        wrapper.register_comm_hook(_renewed(state, former), hook)
    return wrapper


def _renewed(state: Any, former: Any) -> Any:
    """Give a hook's state the new default group in place of the former one; return the state.

    Raises SessionError: it holds another group of an earlier generation.
    """
    if state is former:
        return dist.group.WORLD
    for name in private.attributes_of(state):
        held = getattr(state, name, None)
        if held is former and former is not None:
            setattr(state, name, dist.group.WORLD)
        elif isinstance(held, dist.ProcessGroup) and held not in private.all_groups():
            raise SessionError(
                f"the state of the communication hook holds a process group of an earlier "
                f"generation ({type(state).__name__}.{name}): set it in the function make_groups="
            )
    return state


def check_options(options: Mapping[str, Any]) -> None:
    """Raise SessionError for an argument of DDP with which no wrapper can be made again."""
    for name in (*_OURS, *_ONCE_ONLY):
        if options.get(name) is not None:
            raise SessionError(
                f"DistributedDataParallel({name}=...) does not work after a regroup; leave "
                f"{name} out"
            )


def broadcast_module_state(module: nn.Module) -> None:
    """Send rank 0's parameters and buffers to all ranks of the default group, for a fresh run."""
    broadcast_tensors([*module.parameters(), *module.buffers()])


class _InitOnce(nn.Module):
    """Keeps the hooks and the mode that a second call of nn.Module.__init__ would delete."""

    def __init__(self) -> None:
        if not private.is_initialised(self):
            super().__init__()


class SteadyDDP(TorchDDP, _InitOnce):
    """DistributedDataParallel with its final bucket layout from the start; see wrap_ddp().

    kept: the objects whose state the Session keeps, or may lose.
    """

    kept: Sequence[Any] = ()

    def __init__(self, module: nn.Module, **ddp_kwargs: Any) -> None:
        static_graph = bool(ddp_kwargs.get("static_graph"))
        # Torch keeps the first layout if it must search for unused parameters.
        self._pinned = static_graph or not ddp_kwargs.get("find_unused_parameters")
        try:
            super().__init__(module, init_sync=False, **ddp_kwargs)
        except (RuntimeError, ValueError) as error:  # an error of the arguments: nothing was sent
            raise SessionError(f"DistributedDataParallel refuses the model: {error}") from error
        if private.uses_python_reducer(self):
            raise SessionError("torch._dynamo's optimize_ddp='python_reducer' has no fixed buckets")
        if self._pinned:
            self._pin()
        # Without an agent a generation does not end early, and a callback on gloo's thread could
        # run while the interpreter ends.
        self._guarded = waits.in_use()
        if self._guarded:  # once for each reducer; reduce_bucket calls the script's own hook
            hooks = private.comm_hooks_of(self)
            private.register_comm_hook(self.reducer, hooks, reduce_bucket)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Register a hook as in DistributedDataParallel; its waits end with a generation."""
        if not self._guarded:
            super().register_comm_hook(state, hook)
            return
        hooks = private.comm_hooks_of(self)
        if hooks:
            raise SessionError("register_comm_hook can only be called once")
        private.check_comm_hook(self, hook)
        plain = state is None or isinstance(state, dist.ProcessGroup)
        if not plain and not any(state is each for each in self.kept):
            raise SessionError(
                f"the Session does not keep the state of the communication hook, a "
                f"{type(state).__name__}: give Session per_rank={{'hook': state}}, or "
                "ignore=[state] if it does not change"
            )
        hooks.append((hook, state))

    def join_hook(self, **_: Any) -> Any:
        """Raise SessionError, from join() and from torch.distributed.algorithms.Join."""
        raise SessionError(_NO_JOIN)

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        # DDP sends the buffers before a forward pass. No other thread could end the wait in torch's
        # own function.
        if self._guarded:
            broadcast_tensors(tensors, authoritative_rank)
        else:
            private.broadcast_buffers(self, tensors, buffer_size, authoritative_rank)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        # About the order in which gradients become ready; _pin() lays out the buckets in this
        # order.
        parameters, sparse = private.parameters_for_reducer(self)
        step = -1 if self._pinned else 1
        return parameters[::step], sparse[::step]

    def _pin(self) -> None:
        """Rebuild the buckets now. The ranks agree without a message, because all do it."""
        try:
            rebuilt = private.rebuild_buckets(self)
        except AttributeError as error:
            raise SessionError(f"torch {torch.__version__} cannot pin DDP's buckets") from error
        if not rebuilt:
            raise SessionError(f"torch {torch.__version__} did not pin DDP's buckets")


class DistributedDataParallel(nn.Module):
    """The model of `Session(model=...)` in a script that would use torch's class of this name.

    It takes the arguments of torch's class. Each generation wraps the module in torch's class with
    these arguments, and this object calls that wrapper: the script keeps one object in all
    generations. Before the Session, after it, and in one process without an agent it calls the
    module. Parameters, state_dict() and modes are those of the module, as in torch's class.

    module: the given module. options: the arguments that the script has given.
    Raises TypeError: an argument that torch's class does not have.
    """

    def __init__(self, module: nn.Module, *positional: Any, **options: Any) -> None:
        super().__init__()
        given = _SIGNATURE.bind(None, module, *positional, **options).arguments
        self.options = {name: value for name, value in given.items() if name not in _NOT_OPTIONS}
        if self.options.get("init_sync"):  # the Session sends rank 0's model in any case
            del self.options["init_sync"]
        self.module = module
        self._hook: tuple[object, Hook] | None = None
        vars(self)["_live"] = None  # no part of this module, which would have its parameters twice

    def bind(self, live: nn.Module | None) -> None:
        """Set the wrapper of the present generation, which forward() calls; None: the module."""
        former = vars(self)["_live"]
        vars(self)["_live"] = live
        if isinstance(live, TorchDDP):
            if live is not former and self._hook is not None:
                live.register_comm_hook(*self._hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapper of the present generation, or the module."""
        live = vars(self)["_live"]
        return (self.module if live is None else live)(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes all-reduce no gradients, as in torch."""
        live = vars(self)["_live"]
        if isinstance(live, TorchDDP):
            return live.no_sync()
        return contextlib.nullcontext()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Register a communication hook for all generations; before the Session or in it.

        Raises SessionError: there is one already.
        """
        if self._hook is not None:
            raise SessionError("register_comm_hook can only be called once")
        self._hook = state, hook
        live = vars(self)["_live"]
        if isinstance(live, TorchDDP):
            live.register_comm_hook(state, hook)

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Raise SessionError: all ranks of a Session do the same steps."""
        raise SessionError(_NO_JOIN)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass all-reduces gradients; see no_sync()."""
        live = vars(self)["_live"]
        return live.require_backward_grad_sync if isinstance(live, TorchDDP) else True

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, whether: bool) -> None:
        live = vars(self)["_live"]
        if isinstance(live, TorchDDP):
            live.require_backward_grad_sync = whether

    @property
    def training(self) -> bool:
        """The mode of the module, which is part of the Session's state."""
        module = vars(self).get("_modules", {}).get("module")
        return module is None or module.training

    @training.setter
    def training(self, mode: bool) -> None:
        live = vars(self).get("_live")
        if live is not None:
            live.training = mode

    def __getstate__(self) -> dict[str, Any]:
        # A copy, such as that of AveragedModel, is outside of the generations.
        return {**vars(self), "_live": None}
