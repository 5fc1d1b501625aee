"""Session: a data-parallel training loop whose processes outlive the faults of their peers.

The script's loop stays its own. The Session forms each generation's process group, wraps the
model in DDP if asked to, brings the state to the step that all go on from, and says the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rekindle import names
from rekindle.errors import CheckpointError
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import Doing
from rekindle.rank import environment as rank_environment
from rekindle.rank.channel import Channel
from rekindle.rank.current_step import StepUnderWay
from rekindle.rank.progress import Progress, phase_of
from rekindle.rank.snapshot_schedule import StateKeeper
from rekindle.rank.step_records import Records
from rekindle.recovery.faults.fault import Kind
from rekindle.training.data.sampler import StepSampler
from rekindle.training.torch.arguments import check_arguments, check_parts, check_shard, with_extra
from rekindle.training.torch.data import random_streams as rng
from rekindle.training.torch.data.session_data import Data
from rekindle.training.torch.faults.classify import kind_of
from rekindle.training.torch.faults.cleanup import drop_gradients, free_frames
from rekindle.training.torch.faults.injection import suffer
from rekindle.training.torch.faults.repairs import Repairs
from rekindle.training.torch.faults.update_window import Updates
from rekindle.training.torch.groups.ddp import broadcast_module_state, wrap_ddp
from rekindle.training.torch.groups.generation_group import Group, leave_for_good, store_at
from rekindle.training.torch.groups.placeholder import in_placeholder, leave_placeholder
from rekindle.training.torch.groups.script_groups import ScriptGroups
from rekindle.training.torch.groups.zero import is_zero, local_optimizer
from rekindle.training.torch.live_state import Standing
from rekindle.training.torch.profiler import TorchProfiler
from rekindle.training.torch.state.snapshot import TorchSnapshotWriter
from rekindle.training.torch.step import Step

_BACKENDS = {"cuda": "nccl", "npu": "hccl"}  # by the type of the model's device; else gloo


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
        check_arguments(model, optimizer)
        self.seed = seed
        self.keep_global_batch = keep_global_batch
        self.rank, self.local_rank = map(rank_environment.number, ("RANK", "LOCAL_RANK"))
        self.world_size = rank_environment.number("WORLD_SIZE", 1)
        self.slot = rank_environment.number(names.ENV_SLOT, self.rank)
        self.full_world = rank_environment.number(names.ENV_FULL_WORLD, self.world_size)
        self.generation = 0
        self._profiler = TorchProfiler(self.slot, self.local_rank, model)
        world, waits, parts = self.full_world, self._profiler.loading, keep_global_batch
        self.data = Data(sampler, loader, world, waits, in_parts=parts)
        if parts:
            check_parts(self.data.sampler, ddp)
        named = {"model": model, "optimizer": local_optimizer(optimizer), "scheduler": scheduler}
        self.named = with_extra(named | self.data.named, extra or {})
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._transient = transient
        self.model: torch.nn.Module = model
        self._module = model
        self._ddp = dict(ddp) if isinstance(ddp, Mapping) else ({} if ddp else None)
        self._backend = backend or _BACKENDS.get(self.device.type, "gloo")
        self._total = 0
        self._reported = True  # the first step of this generation
        self.page = rank_environment.page()
        self._progress = Progress(self.page)
        self._group = Group()
        self._channel = Channel.from_environment()
        self.records = Records(rank_environment.path(names.ENV_METRICS_FILE), self.page, self.slot)
        self._groups = ScriptGroups(model, optimizer, make_groups, timeout_s=timeout_s)
        fresh = model if self._ddp is not None else None
        self._standing = Standing(self.named, self._groups, fresh=fresh)
        self._place = self._groups.place(self.slot, self.full_world, shard)
        check_shard(self._place.shard, ddp=bool(ddp) and not is_zero(optimizer), parts=parts)
        writer = functools.partial(TorchSnapshotWriter, seed=seed)
        self._keeper = StateKeeper(self._channel, self._place, self._profiler, writer)
        self._step = StepUnderWay()
        self._repairs = Repairs(self.slot, self.device, model, self._step)
        together = self._place.shard is not None or self.device.type == "npu"
        self._updates = Updates(self.page, self._repairs, self._group, together=together)
        self._updates.watch(self.named)
        self._dismissed, self._passed = False, 0  # steps after which all ranks were let go

    @property
    def finished(self) -> int:
        """Steps finished, of the whole run."""
        return self._standing.finished

    def __enter__(self) -> Session:
        """Meet the other ranks and take the state that training goes on from."""
        if self._channel is None:
            self._form_alone()
        else:
            self._regroup()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the process group; an exception of the script goes its way."""
        if self._channel is not None:
            if kind is None and 0 < self.finished < self._total and not self._is_left():
                self._keep(last=True)  # the script has left its loop early
            self._group.leave()
        elif dist.is_initialized():
            leave_for_good()
        self._progress.leave()
        self.data.close()
        self._keeper.close()
        self._profiler.close()
        self.records.close()

    def steps(self, total: int) -> Iterator[Step]:
        """Yield the steps that are left of `total`; one that a fault broke comes again.

        total: steps of the whole run, also of those done before a restart.
        """
        self._total, channel = total, self._channel
        self._progress.asked_for(total)
        while True:
            if channel is not None and self._is_left():
                if not self._regroup():
                    return
            elif self.finished >= total:
                # A new process must not wait at a place that the others have passed.
                if channel is None or total <= self._passed or not self._regroup():
                    return
            elif channel is not None and channel.hold(self.slot, self.generation, self.finished):
                self._repairs.device.free()
            elif self._keep_buffers():
                yield Step(self)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say what the script does that takes longer than a step: `with session.phase("evaluate"):`

        name: evaluate, checkpoint or compile. Whoever hangs in it is found later than in a step,
        and ranks that wait meanwhile are not taken for hanging.
        Raises SessionError: another name.
        """
        return self._progress.at(phase_of(name))

    def _keep_buffers(self) -> bool:
        """Keep what the step's forward pass will change; False: a fault showed itself instead."""
        try:
            if self._channel is not None:
                self._repairs.buffers.keep()
        except Exception as error:  # devices tell of their faults late
            if not self.leave_step(error):
                raise
            return False
        return True

    def _is_left(self) -> bool:
        """Whether this rank is in no generation: its last one is over, or all were let go.

        Ranks that were let go meet again when the script asks for more steps.
        """
        assert self._channel is not None
        again = self._dismissed and self.finished < self._total
        return again or self._channel.is_over(self.generation)

    # ---- what a step tells

    def begin_step(self, step: int) -> None:
        """The step's body begins, for the first time or again."""
        self._progress.begin_step()
        self._step.begin()
        rng.begin_step(self.seed, self.rank, step)
        if self._channel is not None:
            self._profiler.begin_step(step, self._channel.profile)
            if self._channel.injected:
                suffer(self._channel.injected, step, self._module, self.named["optimizer"])

    def end_step(self) -> None:
        """The step's body ended well: the state is that of one more step."""
        self._repairs.device.wait()  # until the update is done, and not merely asked for
        self._repairs.times.at(self.finished + 1)  # maybe no optimizer was asked
        self._standing.step_done(self.generation)
        self.data.advance()
        self._progress.end_step(self.finished)
        self._profiler.end_step()
        self._step.end(self.finished)
        if self._channel is None:
            return
        if not self._reported:
            self._reported = True
            self._channel.send(
                protocol.StepDone(
                    rank=self.slot, generation=self.generation, finished=self.finished
                )
            )
        self._groups.step_done()
        self._keep(last=self.finished == self._total)

    def _keep(self, *, last: bool) -> None:
        """Take a snapshot if one is due; of the last step of all a checkpoint is."""
        with self._progress.at(Doing.CHECKPOINT):
            self._keeper.keep(
                self.named,
                place=self._place,
                step=self.finished,
                last=last,
                position=self.data.position(),
                metrics=self.records.numbers_of(self.finished - 1),
            )

    def leave_step(self, error: BaseException) -> bool:
        """The step's body raised; say whether a regroup follows (else the error is the script's).

        Returns when the generation is over.
        """
        self._step.break_off()
        channel = self._channel
        if channel is None:
            return False
        kind = kind_of(error, self._transient)
        if kind is None and not channel.is_over(self.generation):
            return False
        if self.page is not None and self.page.in_update:
            self._standing.tear()
        self._end_generation(channel, kind or Kind.LINK, error)
        return True

    def _end_generation(self, channel: Channel, kind: Kind, error: BaseException) -> None:
        self._repairs.kind = kind
        if kind is Kind.DEVICE_MEMORY or not channel.is_over(self.generation):
            self._repairs.report(channel, error, generation=self.generation, finished=self.finished)
        channel.wait_over(self.generation)
        free_frames(error)

    def _repair(self) -> None:
        """Make the device usable again, once the generation is over."""
        channel = self._channel
        assert channel is not None
        if not channel.is_over(self.generation):
            return
        channel.wait_over(self.generation)
        keep, place = not self._standing.torn, (self.generation, self.finished)
        if not self._repairs.repair(channel, self.named, *place, restores=keep):
            self._standing.tear()

    # ---- generations

    def _regroup(self) -> bool:
        """Arrive, and form the next generation; False: all ranks are done."""
        channel = self._channel
        assert channel is not None
        while True:
            self._repair()
            self._progress.meet()
            channel.send(
                protocol.Arrived(
                    rank=self.slot,
                    generation=self.generation,
                    shard=self._place.shard,
                    finished=self._standing.told,
                    torn=self._standing.torn,
                    made=self._standing.made,
                    clean=self._repairs.clean,
                    done=self._standing.whole and 0 < self._total <= self.finished,
                    passed=self._passed,
                )
            )
            message = channel.wait(self.generation)
            self._dismissed = isinstance(message, protocol.Dismiss)
            if isinstance(message, protocol.Dismiss):
                self._passed = message.finished
                self._progress.leave()
                return False
            self._repair()  # the device may have been stopped once more, for a peer's sake
            if self._form(message):
                return True

    def _form(self, form: protocol.Form) -> bool:
        """Form this generation with the state that the plan names; False: it is over already."""
        channel = self._channel
        assert channel is not None
        self._group.leave()
        leave_placeholder()
        self.generation = form.generation
        self._place = self._place.moved(form)
        self.rank, self.world_size = form.ranks[self.slot], form.world_size
        rank_environment.move(self.rank, self.world_size)
        self._passed = max(self._passed, form.passed)
        group = self._group = self._updates.group = Group(self.page)
        channel.on_over = functools.partial(self._stop, group)
        if channel.is_over(form.generation):
            return False
        try:
            group.form(
                store=store_at(form.store_host, form.store_port),
                generation=form.generation,
                rank=self.rank,
                world_size=form.world_size,
                backend=self._backend,
                timeout_s=self._groups.timeout_s,
                device_id=self.device if self.device.type in _BACKENDS else None,
                make_more=self._groups.make,
            )
            plan = form.plan[self.slot]
            self._standing.take(plan, (form.step, form.made), self._place, channel)
            self._repairs.took_state(self.finished)
            self._standing.send(plan)
            self._begin()
        except CheckpointError as error:
            ready = protocol.StateReady(
                rank=self.slot, generation=form.generation, error=str(error)
            )
            channel.send(ready)
            channel.wait_over(form.generation)
            return False
        except Exception as error:
            kind = kind_of(error)
            if kind is None and not channel.is_over(form.generation):
                raise
            self._end_generation(channel, kind or Kind.LINK, error)
            return False
        channel.send(protocol.StateReady(rank=self.slot, generation=form.generation))
        return True

    def _stop(self, group: Group, over: protocol.Over) -> None:
        """Wake the main thread from whatever it waits for; called by the channel's thread."""
        if over.generation < self.generation:
            return
        self._step.wait_end(over.finished)
        group.sever()
        self._repairs.device.stop()

    def _begin(self) -> None:
        """Make everything that belongs to one generation."""
        self._repairs.buffers.look()
        drop_gradients(self._module, self.named["optimizer"])
        if self._ddp is not None:
            wrapper = self.model if isinstance(self.model, DistributedDataParallel) else None
            if self.world_size > 1 or self._channel is not None:
                self.model = wrap_ddp(self._module, existing=wrapper, **self._ddp)
        shares = self.full_world if self.keep_global_batch else None
        self.data.bind(self.rank, self.world_size, shares)
        self._reported = False
        self._progress.formed(self.finished)

    def _form_alone(self) -> None:
        """Form the group as torchrun's environment says, for a rank without an agent."""
        if self.world_size > 1 or in_placeholder():
            self._groups.form_by_hand(self._backend)
            if self._ddp is not None:
                broadcast_module_state(self._module)
        self._standing.whole = True
        self._begin()
