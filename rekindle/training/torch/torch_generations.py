"""Do a torch rank's part in each generation: its process group, its DDP wrapper, its state."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from rekindle import names
from rekindle.console import say
from rekindle.errors import CheckpointError
from rekindle.protocol.heartbeat_page import StateDigest
from rekindle.protocol.rank import FormGeneration, GenerationEnded
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.member import Arrival, UnusableError, text_of
from rekindle.rank.progress import CurrentStep, HeldState, ProgressReporter, RankPlace
from rekindle.rank.snapshot_schedule import SnapshotSchedule
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.policy.plan import RankPlan, StateSource
from rekindle.states import StateId
from rekindle.training.torch.arguments import Arguments
from rekindle.training.torch.data.session_data import Data
from rekindle.training.torch.faults.repairs import Repairs, Updates, check_use, kind_of
from rekindle.training.torch.groups.ddp import SteadyDDP, broadcast_module_state, wrap_ddp
from rekindle.training.torch.groups.generation_group import Group, store_at
from rekindle.training.torch.groups.script_groups import (
    ScriptGroups,
    in_placeholder,
    leave_placeholder,
)
from rekindle.training.torch.single_ranks import check_shards, own_state_of, replicated
from rekindle.training.torch.state.before_step import BeforeStep
from rekindle.training.torch.state.capture import PARTS, Modes, capture
from rekindle.training.torch.state.checkpoint import load_checkpoint
from rekindle.training.torch.state.digests import ReplicaDigests
from rekindle.training.torch.state.own_state import OwnState, check_generators
from rekindle.training.torch.state.script_variables import Variables
from rekindle.training.torch.state.sharding import GivenValues, values_of
from rekindle.training.torch.state.snapshot import load_snapshot
from rekindle.training.torch.state.statistics import (
    SharedStatistics,
)
from rekindle.training.torch.state.transfer import receive_state, send_state

_BACKENDS = {"cuda": "nccl", "npu": "hccl"}  # by the type of the device; gloo for others


def fetch_state(
    plan: RankPlan,
    state: StateId,
    *,
    place: RankPlace,
    named: Mapping[str, Any],
    channel: Channel,
    fresh: torch.nn.Module | None,
) -> GivenValues | None:
    """Set the live objects to the plan's state; return the values of its script, if they are known.

    fresh: the module that all ranks must begin with in the form that rank 0 has built.
    Raises CheckpointError or CorruptError: the source does not have the state that the plan
    expects.
    """
    match plan.source:
        case StateSource.PEER:
            receive_state(named, plan.peer)
        case StateSource.SNAPSHOT:
            load_snapshot(channel, place.slot, named, state)
        case StateSource.REPLICA:
            load_snapshot(channel, place.slot, named, state, copy=True)
        case StateSource.CHECKPOINT:
            return load_checkpoint(os.environ[names.ENV_CHECKPOINT_STORE], named, state, place)
        case StateSource.FRESH if fresh is not None:
            broadcast_module_state(fresh)
    return None


class TorchGenerations:
    """Forms the generations of one rank; an adapter of `rekindle.rank.member.Member`.

    model: the module, or its DDP wrapper of this generation. rank, world_size: rank and world size
    in this generation. place: the shard of the state that the rank holds, and the rank that writes
    it. values: those with which the script began the state. compared_steps: the steps after which
    these processes, or those that they replace, have searched for forgotten objects.
    """

    def __init__(
        self,
        given: Arguments,
        data: Data,
        *,
        channel: Channel | None,
        state: HeldState,
        progress: ProgressReporter,
        step: CurrentStep,
    ) -> None:
        self._given = given
        self.model: torch.nn.Module = given.model
        self.slot, self.full_world = rank_environment.slot_of_world()
        self.rank = rank_environment.number("RANK")
        self.world_size = rank_environment.number("WORLD_SIZE", 1)
        self.device = next((p.device for p in given.model.parameters()), torch.device("cpu"))
        self.groups = ScriptGroups(
            given.model, given.optimizer, given.make_groups, timeout_s=given.timeout_s
        )
        self.place = self.groups.place(self.slot, self.full_world, given.shard)
        given.check_shard(self.place.shard)
        modes = Modes()
        self.named = given.named({**data.named, "modes": modes})
        alone = given.of_one_rank()
        self.everything = everything = {**self.named, **alone}
        if not rank_environment.is_replacement():
            # Refuse now what a snapshot could not hold. A loader's state may start its workers.
            capture({name: each for name, each in everything.items() if name not in data.named})
        kept = (*given.objects(), *everything.values())
        self.variables = Variables(kept, given.ignore, tells=self.slot == 0)
        self._lacks_variables = False  # this new process could not get them with a live state
        self._statistics = given.statistics()
        self.own = own_state_of(
            given, self._statistics, self.variables, channel=channel, place=self.place
        )
        if self.own is None:
            self.named = everything  # no other rank gives or takes this state
        self.values = values_of(self.named, data.sampler, seed=given.seed, ranks=self.full_world)
        others = replicated(given, self.named, self._statistics, self.place)
        self.digests = ReplicaDigests(
            given.model,
            given.optimizer,
            {**self.named, **others},
            others,
            self.place,
            progress.page,
        )
        self.group = Group()
        before = BeforeStep(
            everything,
            modes,
            leave=data.named,
            optimizer=given.optimizer,
            tells=self.slot == 0,
        )
        self.repairs = Repairs(self.device, before, step)
        together = self.place.shard is not None or self.device.type == "npu"
        self.updates = Updates(progress.page, self.repairs, self.group, together=together)
        self.updates.guard = given.guard
        self.checkpoint_every = self.compared_steps = 0  # the same on all ranks of a generation
        if channel is not None or given.guard is not None:
            self.updates.watch(everything)
        if channel is not None:
            self.groups.guard()
            if self.full_world > 1 and self.place.shard is None:
                self.updates.statistics = SharedStatistics(self._statistics.shared)
        self._keeps_gradients = _has_gradients(self.named["optimizer"])
        self._ddp = given.ddp_options()
        self._backend = given.backend or _BACKENDS.get(self.device.type, "gloo")
        self._data, self._channel = data, channel
        self._state, self._progress, self._step = state, progress, step
        self._present: tuple[StateDigest, ...] = ()  # of the state after the last generation
        self._compared: dict[str, int] = {}

    @property
    def kept(self) -> dict[str, Any]:
        """The objects of a snapshot: those of `named`, and the parts of all ranks."""
        has_parts = self.own is not None and self.own.parts.rows is not None
        return self._loadable if has_parts else self.named

    @property
    def _loadable(self) -> dict[str, Any]:
        return self.named if self.own is None else {**self.named, PARTS: self.own.parts}

    def complete(
        self, schedule: SnapshotSchedule, *, last: bool, leaves: bool, alone: bool
    ) -> bool:
        """Collect the states of single ranks for a due snapshot; False: it would lack them.

        last, leaves: the script ends its loop; other ranks may still be in theirs. alone: other
        ranks may have passed this place.
        """
        own = self.own
        if own is None or not (own.of_steps or self._data.epochs.is_used):
            return True
        state = StateId(self._state.finished, self._state.generation)
        if not own.has_parts(state) and schedule.is_due(
            state.step, self.checkpoint_every, last=last
        ):
            if leaves:
                own.exchange(state, reads=self.place.writes)
            elif not alone:
                own.gather(state)
        if last and not own.of_steps and not own.has_parts(state):
            own.parts.rows = None  # the last snapshot must exist; only a later run has epochs
            return True
        return own.has_parts(state)

    def arrival(self) -> Arrival:
        """Return the values that torch adds to `Arrived`."""
        done = self._state.whole and 0 < self._progress.total <= self._state.finished
        return Arrival(
            done,
            shard=self.place.shard,
            valid_steps=self.repairs.valid_steps,
            replicas=self.digests.number,
            items=self.digests.items,
            digests=self._present,
            tensors=self._compared,
            compared=self.compared_steps,
            own=self._own_copies(),
        )

    def _own_copies(self) -> tuple[StateId, ...] | None:
        """Return the states whose part of this rank is in the memory of its agent; None: no part.

        A process that is in its loop has its variables.
        """
        if self.own is None or self.own.of_steps:
            return self.own.states() if self.own is not None else None
        if not self.variables.is_new or not rank_environment.is_replacement():
            return None
        states = () if self._lacks_variables else self.own.states()
        if states:
            newest = max(states, key=lambda state: (state.generation, state.step))
            self.own.took(newest, copied=True)
        return states if self._lacks_variables or self.variables.has_values else None

    def begin_step(self) -> None:
        """Record whether the script keeps its gradients' memory from step to step."""
        self.updates.gradients.begin_step()
        self.updates.statistics.begin_step()
        self._keeps_gradients = _has_gradients(self.named["optimizer"])

    def recover(self) -> None:
        """Make the device usable again if the generation has ended. Raises UnusableError."""
        channel, generation = self._channel, self.place.generation
        if channel is None:
            return
        if not channel.is_over(generation):
            self._present = self.digests.present(self._state, compared=True)
            return
        channel.wait_over(generation)
        if not self.repairs.repair(self.named, restores=not self._state.torn):
            self._state.tear()
        try:
            self._present = self.digests.present(self._state, compared=False)
        except RuntimeError as error:  # the device cannot compute
            self.repairs.note(FaultKind.DEVICE, error)
            raise UnusableError(text_of(error)) from error
        self._compared = self.digests.tensors(channel.compared)

    def enter(self, form: FormGeneration) -> Callable[[GenerationEnded], None]:
        """Leave the former process group; return a function that severs the new one."""
        self.group.leave()
        leave_placeholder()
        self.place = self.place.moved(form)
        self.checkpoint_every = form.settings.checkpoint_every
        self.compared_steps = max(self.compared_steps, form.compared)
        self.rank, self.world_size = form.ranks[self.slot], form.world_size
        rank_environment.move(self.rank, self.world_size)
        self.group = self.updates.group = Group(self._progress.page)
        return functools.partial(self._stop, self.group)

    def form(self, form: FormGeneration) -> None:
        """Form the process group, and take the state that the plan names."""
        self.group.form(
            store=store_at(form.store_host, form.store_port),
            generation=form.generation,
            rank=self.rank,
            world_size=self.world_size,
            backend=self._backend,
            timeout_s=self.groups.timeout_s,
            device_id=self.device if self.device.type in _BACKENDS else None,
            make_more=self.groups.make,
        )
        check_shards(self._given, self._statistics, self.place, self.world_size)
        plan = form.plan[self.slot]
        self._take(plan, form)
        self.repairs.took_state(self._state.finished)
        if plan.source is StateSource.FRESH and self.place.shard is None:
            check_generators(self._given.extra, self.named)
        if plan.sends_to:
            # What a rank has loaded includes the parts of all ranks.
            trained = plan.source in (StateSource.SELF, StateSource.FRESH)
            send_state(capture(self.named if trained else self.kept), plan.sends_to)
        if self.own is not None:
            self.own.begin(
                StateId(form.step, form.state_generation), fresh=plan.source is StateSource.FRESH
            )
        self._begin(wrap=True)

    def form_by_hand(self) -> None:
        """Form the group from torchrun's environment, for a rank without an agent."""
        together = self.world_size > 1
        if together or in_placeholder():
            self.groups.form_by_hand(self._backend)
            if self._ddp is not None:
                broadcast_module_state(self._given.model)
        self._state.hold(StateId(0, 0))
        self._begin(wrap=together)
        self._progress.formed(0)

    def failed(self, error: BaseException) -> FaultKind | None:
        """Return the kind of fault that broke the forming; None: torch is not known to raise it.

        Raises SessionError: the script gives one GPU to several ranks.
        """
        check_use(error)
        kind = kind_of(error)
        self.repairs.note(kind or FaultKind.LINK, error)
        return kind

    def _stop(self, group: Group, over: GenerationEnded) -> None:
        """Wake the main thread from any wait in this generation."""
        self._step.wait_end(over.finished)
        group.sever()
        self.repairs.device.stop()

    def _take(self, plan: RankPlan, form: FormGeneration) -> None:
        """Take the planned state. Raises CheckpointError, CorruptError: it is missing."""
        state = StateId(form.step, form.state_generation)
        if plan.source is not StateSource.SELF:
            assert self._channel is not None
            self._state.replace(plan.source)
            former = fetch_state(
                plan,
                state,
                place=self.place,
                named=self._loadable,
                channel=self._channel,
                fresh=self._given.model if self._ddp is not None else None,
            )
            self.groups.loaded(plan.source)
            if self.own is not None and plan.source is not StateSource.FRESH:
                copied = plan.source is StateSource.PEER
                if self.own.of_steps:
                    self.own.took(state, copied=copied)
                else:
                    self._take_variables(self.own, state, copied=copied)
            if former is not None:
                self._compare(former, form)
        self._state.hold(state)

    def _take_variables(self, own: OwnState, state: StateId, *, copied: bool) -> None:
        """Take the variables of the script's loops, in a new process.

        Raises CheckpointError: the former process of this rank ended at another place than the
        peers have reached, or with its node. Then all ranks return to a snapshot.
        """
        position, loaded = self._data.epochs, own.parts.loaded
        own.parts.loaded = False
        if not self.variables.is_new or not position.is_used:
            return
        self.variables.load_state_dict({})
        if (loaded and own.parts.rows is not None) or (copied and state in own.states()):
            own.parts.loaded = loaded
            own.took(state, copied=copied)
        just_left = position.has_just_left(self.variables.place) and not self.variables.lasts
        if just_left or (position.leads_to(None) and not self.variables.has_values):
            self.variables.load_state_dict({})  # the code sets them again
            return
        if position.leads_to(self.variables.place):
            return
        if not copied:
            say(f"rank {self.slot}: the state has no variables of the script; they begin again")
            return
        self._lacks_variables = True
        raise CheckpointError(
            f"the former process of rank {self.slot} ended where nobody knows its variables"
        )

    def _compare(self, former: GivenValues, form: FormGeneration) -> None:
        """Report in one line each how the script's values differ from those of the state."""
        readers = (s for s, plan in form.plan.items() if plan.source is StateSource.CHECKPOINT)
        if self.slot == min(readers):
            for difference in self.values.differences(former):
                say(f"training continues after step {form.step}: {difference}")
        self.values = self.values.in_force(former)

    def _begin(self, *, wrap: bool) -> None:
        """Make the objects of one generation. wrap: whether to use DDP, if requested."""
        self.begin_anew()
        if self._ddp is not None and wrap:
            existing = self.model if isinstance(self.model, DistributedDataParallel) else None
            self.model = wrap_ddp(self._given.model, existing=existing, **self._ddp)
            self.model.training = self._given.model.training
            if isinstance(self.model, SteadyDDP):
                given = self._given
                self.model.kept = (*given.extra.values(), *given.per_rank.values(), *given.ignore)
            if self._given.wrapper is not None:
                self._given.wrapper.bind(self.model)
        shares = self.full_world if self._given.keep_global_batch else None
        self._data.bind(self.rank, self.world_size, shares)
        self.digests.begin(self.place, self.world_size)
        self.updates.open = True
        self.groups.open = self._channel is not None

    def begin_anew(self) -> None:
        """Forget what a broken or skipped step has left: its gradients, and the copies of state."""
        self.repairs.before.look()
        self.updates.gradients.reset()
        self.updates.statistics.begin_step()
        parameters = (*self._given.model.parameters(), *_parameters_of(self.named["optimizer"]))
        renew_gradients(parameters, keep=self._keeps_gradients)

    def close(self) -> None:
        """Note that the script leaves its Session."""
        self.updates.open = self.groups.open = False


def renew_gradients(parameters: Iterable[torch.nn.Parameter], *, keep: bool) -> None:
    """Make the gradients of a broken step invisible to the next step.

    keep: a CUDA graph, or a script's own buffer, has the gradients' memory. They become zero there.
    """
    with torch.no_grad():
        for parameter in parameters:
            if keep and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters_of(optimizer))


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
