"""The habits: what the page says about each, and the outcome that its trials must have."""

from __future__ import annotations

import dataclasses
import enum

RANKS = 2


class Outcome(str, enum.Enum):
    """What happens to a script when ranks fail."""

    EXACT = "exact"  # no step is lost, and all values are those of a run without faults
    REPEATS = "repeats"  # at most `--snapshot-every` steps are repeated; the values are the same
    REFUSED = "refused"  # an error with the remedy ends the job


@dataclasses.dataclass(frozen=True)
class Habit:
    """One habit.

    name: of its script. row: what the script has, for the page. do: what its author does.
    options: of `rekindle run`. text: parts of the error that refuses it, with ` ... ` between them.
    repeats: steps that one fault may cost; for a refused script, the last step that it may begin.
    killed: it needs a fault.
    """

    name: str
    row: str
    do: str
    outcome: Outcome = Outcome.EXACT
    options: tuple[str, ...] = ()
    text: str = ""
    repeats: int = 0
    killed: bool = False


HABITS = (
    Habit(
        "ddp",
        "DDP",
        "`Session(model=module, ddp=True)`, or `ddp={...}` with DDP's keyword arguments",
    ),
    Habit(
        "torchrun_lines",
        "process group, DDP wrapper, `DistributedSampler` with the epoch from `step.number`, "
        "`destroy_process_group()`",
        "`init` and `DistributedDataParallel` of `rekindle.training.torch`: "
        "[session.md](session.md#lines-that-may-stay)",
    ),
    Habit(
        "own_all_reduce",
        "gradients that the script all-reduces",
        "no `ddp`; build the same weights on every rank",
    ),
    Habit("sgd_momentum", "momentum, a learning rate for each layer", ""),
    Habit(
        "batchnorm",
        "BatchNorm",
        "nothing: [BatchNorm](#batchnorm)",
    ),
    Habit(
        "batchnorm_apart",
        "BatchNorm with other statistics on each rank (`broadcast_buffers=False`, no `ddp`)",
        "nothing: [BatchNorm](#batchnorm)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "seeded_by_rank",
        "a generator that each rank seeds with its number",
        "`per_rank=`: [State of one rank](session.md#state-of-one-rank)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "environment",
        "an environment, or another object that differs between ranks",
        "`per_rank=`: [State of one rank](session.md#state-of-one-rank)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit("dropout", "dropout, noise", "nothing inside the step"),
    Habit("autocast", "mixed precision with `autocast`, bfloat16", ""),
    Habit("grad_scaler", "`GradScaler`", '`extra={"scaler": scaler}`'),
    Habit(
        "grad_scaler_clipping",
        "`GradScaler` with `unscale_()` and clipping",
        '`extra={"scaler": scaler}`',
    ),
    Habit(
        "accumulation",
        "gradient accumulation inside one step",
        "`no_sync()` as usual: [Gradient accumulation](#gradient-accumulation)",
    ),
    Habit(
        "accumulation_over_steps",
        "gradient accumulation over several steps",
        "one step for each update: [Gradient accumulation](#gradient-accumulation)",
        Outcome.REFUSED,
        text="adds to the gradients of the step before",
        repeats=1,
    ),
    Habit("clipping", "gradient clipping", ""),
    Habit("activation_checkpointing", "activation checkpointing", ""),
    Habit(
        "averaged_model",
        "EMA in an `AveragedModel`",
        '`extra={"ema": ema}`: [EMA](#ema-and-other-averages)',
    ),
    Habit(
        "own_ema",
        "an EMA of the script's own",
        "`extra=`, with `state_dict()` and `load_state_dict()`",
    ),
    Habit("swa", "SWA, `SWALR`", '`scheduler=`, `extra={"average": average}`'),
    Habit("cosine", "LR scheduler", "`scheduler=`; several: [Schedulers](#schedulers)"),
    Habit("one_cycle", "`OneCycleLR`", "`scheduler=`"),
    Habit("lambda_lr", "`LambdaLR`", "`scheduler=`"),
    Habit("plateau", "`ReduceLROnPlateau`", "`scheduler=`, and the same value on all ranks"),
    Habit("kept_group", "a parameter group that the script keeps, and changes by hand", ""),
    Habit("schedule_by_step", "a learning rate that follows from the step's number", ""),
    Habit(
        "two_optimizers",
        "two optimizers in one step",
        "the second in `extra=`: [Several optimizers](#several-optimizers)",
    ),
    Habit(
        "alternating_optimizers",
        "an optimizer that not each step uses",
        "the other optimizers in `extra=`",
    ),
    Habit(
        "late_group",
        "a layer that trains from a later step on",
        "its own parameter group from the beginning, with `lr=0` before",
    ),
    Habit(
        "gan",
        "a GAN: two networks in turn",
        "one update in each step; the second network and optimizer in `extra=`",
    ),
    Habit(
        "lbfgs",
        "LBFGS, updates in the backward pass",
        "nothing: a fault in the update returns all ranks to the newest snapshot, or to step 0",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "compile",
        "`torch.compile`",
        "`Session(model=torch.compile(model), ddp=True)`: [torch.compile](#torchcompile)",
    ),
    Habit("frozen", "frozen weights", ""),
    Habit(
        "lora",
        "LoRA, with a base that one rank loads",
        "`ddp=True` sends the weights of rank 0. A snapshot copies frozen weights once, and again "
        "if they change",
    ),
    Habit(
        "guarded",
        "batches with NaN, spikes of the loss",
        "`guard=Guard(spike=8.0)`: [Bad batches](session.md#bad-batches)",
    ),
    Habit(
        "fsdp",
        "FSDP2 (`fully_shard`)",
        "torch 2.13 or newer, `init_placeholder_group()`, no `ddp`, the optimizer after "
        "`fully_shard()`: [session.md](session.md#fsdp2-and-hsdp)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "zero",
        "`ZeroRedundancyOptimizer`",
        "`init_placeholder_group()`, no `overlap_with_ddp=True`: "
        "[session.md](session.md#zeroredundancyoptimizer)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "own_groups",
        "own process groups (`dist.new_group`)",
        "create them, and the objects that depend on them, in the function `make_groups=`",
    ),
    Habit(
        "hook",
        "DDP communication hook",
        "call `session.model.register_comm_hook()` for each new `session.model`, or that of "
        "Rekindle's `DistributedDataParallel` at any time",
    ),
    Habit(
        "power_sgd",
        "PowerSGD, or another hook with a state",
        '`per_rank={"hook": state}`',
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "loader",
        "`DataLoader` with workers",
        "`batch_sampler=StepSampler(...)`, `loader=`: [data.md](data.md)",
    ),
    Habit(
        "stream",
        "samples without an index",
        "`ElasticStream`, `loader=`: [data.md](data.md#streams)",
    ),
    Habit(
        "stateful_loader",
        "a loader that keeps its own position",
        "`loader=`: [data.md](data.md#loaders-with-their-own-state)",
    ),
    Habit(
        "augmentation",
        "random augmentations in the step",
        "nothing; in workers seed by sample: [Random numbers](#random-numbers)",
    ),
    Habit("batch_sizes", "variable batch sizes", "[Variable batch sizes](#variable-batch-sizes)"),
    Habit("evaluation", "evaluation inside the step", "[Evaluation](#evaluation)"),
    Habit("meter", "a meter, a counter", "`extra=`"),
    Habit("replay_buffer", "a replay buffer", "`extra=`"),
    Habit("generator", "a `torch.Generator` of the script's own", "`extra=`"),
    Habit("numpy_generator", "a numpy `Generator`", "`extra=`"),
    Habit(
        "own_checkpoints",
        "own checkpoints",
        "not needed for recovery: [Own checkpoints](#own-checkpoints)",
    ),
    Habit(
        "keep_global_batch",
        "a fixed global batch in a world that shrinks",
        "`keep_global_batch=True`, `step.parts()`",
    ),
    Habit(
        "metric", "a metric of all ranks", "all-reduce it in the step, before `optimizer.step()`"
    ),
    Habit("tied", "tied weights", ""),
    Habit(
        "flat_gradients",
        "one buffer for all gradients (`p.grad` is a view)",
        "no `ddp`; set the buffer to zero in each step",
    ),
    Habit("sparse", "an embedding with sparse gradients", "all-reduce them yourself"),
    Habit("recurrent", "a hidden state that goes from step to step", "`extra=`"),
    Habit("early_stop", "early stopping", "[Early stopping](#early-stopping)"),
    Habit(
        "unused_parameters", "`find_unused_parameters`", '`ddp={"find_unused_parameters": True}`'
    ),
    Habit("foreach", "a fused optimizer", ""),
    Habit(
        "epochs",
        "a loop over epochs and a `DataLoader`, with validation and a scheduler",
        "[`session.epochs`](session.md#epochs-and-batches)",
    ),
    Habit(
        "epochs_shuffle",
        "`shuffle=True`, a `GradScaler`, a scheduler after each batch, in epochs",
        '`session.epochs`, `extra={"scaler": scaler}`',
    ),
    Habit(
        "running_loss",
        "a sum of losses in a variable, printed at the end of an epoch; the best epoch",
        "nothing with `session.epochs`: [variables](session.md#variables-of-a-loop-over-epochs)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "trainer_class",
        "a class that trains, with meters, counters, arrays and lists, in epochs",
        "nothing with `session.epochs`: [variables](session.md#variables-of-a-loop-over-epochs)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "image_recipe",
        "mixup, an EMA in a copy, meters, a rate for each update, the best epoch",
        '`session.epochs`, `extra={"ema": ema}`',
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "text_recipe",
        "micro-batches, a warm-up, counters, a copy of the best weights, in epochs",
        "nothing with `session.epochs`: [variables](session.md#variables-of-a-loop-over-epochs)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "callbacks",
        "a class that calls the hooks of callbacks, a history, early stopping",
        "nothing with `session.epochs`: [variables](session.md#variables-of-a-loop-over-epochs)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "critic_updates",
        "a GAN whose critic has more updates than its generator, with a gradient penalty",
        "`session.epochs`, the second network and optimizer in `extra=`",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "policy_gradient",
        "an environment and a replay memory of each rank, a falling rate of chance",
        "`per_rank=`, with numbers in a dict: [State of one rank](session.md#state-of-one-rank)",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "distillation",
        "a frozen teacher, forward hooks, a warm-up in a `SequentialLR`",
        "give the module that has both networks; the optimizer has the student alone",
    ),
    Habit(
        "growing_data",
        "another data set and batch size in each epoch",
        "a new loader in each epoch of `session.epochs`",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "gradient_noise",
        "noise in the gradients from an own generator, a limit from the last norms",
        '`extra={"noise": noise, "norms": norms}`',
    ),
    Habit(
        "average_of_weights",
        "SWA by epoch, `update_bn` after the loop",
        '`session.epochs`, `extra={"average": average, "late": late}`',
    ),
    Habit(
        "two_loaders",
        "two loaders together, pseudo labels by a threshold in a variable",
        "`session.batches(lambda: zip(loader, other))`",
        Outcome.REPEATS,
        options=("--snapshot-every", "1"),
        repeats=1,
    ),
    Habit(
        "own_parameter",
        "a trained tensor that is in no module",
        '`extra={"scale": scale}`; all-reduce its gradient',
    ),
    Habit("curriculum", "a loss that changes with the step's number", ""),
    Habit(
        "no_step_block",
        "no `with step:` block",
        "put the step's work inside `with step:`",
        Outcome.REFUSED,
        text="with step:",
    ),
    Habit(
        "added_group",
        "`optimizer.add_param_group()` in training",
        "give all groups at the beginning, with `lr=0` in those that begin later",
        Outcome.REFUSED,
        text="Give it all groups before",
        repeats=5,
    ),
    Habit(
        "two_sessions",
        "two Sessions in one script",
        "one Session, and the phase from `step.number`; or two jobs",
        Outcome.REFUSED,
        text="has a Session already",
        repeats=24,
    ),
    Habit(
        "update_after_loop",
        "`optimizer.step()` after the loop",
        "do each update inside `with step:`",
        Outcome.REFUSED,
        text="outside of `with step:`",
        repeats=24,
    ),
    Habit(
        "group_in_training",
        "`dist.new_group` after entering the `Session`",
        "call it in the function `make_groups=`",
        Outcome.REFUSED,
        text="in the function make_groups=",
        repeats=-1,
    ),
    Habit(
        "kept_world",
        "a group of an earlier generation, after a fault",
        "use `group=None`, or make it in `make_groups=`",
        Outcome.REFUSED,
        text="a process group of an earlier generation",
        repeats=6,
        killed=True,
    ),
    Habit(
        "forgotten_ema",
        "an EMA that is not in `extra=`",
        "give it to the `Session`",
        Outcome.REFUSED,
        text="ema",
        repeats=2,
    ),
    Habit(
        "forgotten_scheduler",
        "a scheduler that the `Session` does not get",
        "`scheduler=`",
        Outcome.REFUSED,
        text="scheduler",
        repeats=2,
    ),
    Habit(
        "forgotten_optimizer",
        "a second optimizer that the `Session` does not get",
        "`extra=`",
        Outcome.REFUSED,
        text="second",
        repeats=2,
    ),
    Habit(
        "forgotten_parameter",
        "a trained tensor that is in no module, and that the `Session` does not get",
        "`extra=`",
        Outcome.REFUSED,
        text="an optimizer changes scale (of shape [1]), ... extra={'scale': ...}",
        repeats=1,
    ),
    Habit(
        "carried_variables",
        "a variable that brings a value from step to step, an iterator that `next()` advances",
        "[Variables of a loop over steps](session.md#variables-of-a-loop-over-steps)",
        Outcome.REFUSED,
        text="step 1 changed batches, temperature, ... Give a loader to the Session, ... ignore=",
        repeats=1,
    ),
    Habit(
        "model_attribute",
        "a number in an attribute of the model, which its forward pass changes",
        "a buffer, or `get_extra_state()`",
        Outcome.REFUSED,
        text="step 1 changed model.temperature, ... ignore=['model.temperature']",
        repeats=1,
    ),
    Habit(
        "pipeline",
        "other weights on each rank, without `shard=`",
        "`shard=`: [session.md](session.md#state-in-shards)",
        Outcome.REFUSED,
        text="shard",
        repeats=24,
    ),
    Habit(
        "no_all_reduce",
        "gradients that nobody all-reduces",
        "`ddp=True`, or an all-reduce in the step",
        Outcome.REFUSED,
        text="differ",
        repeats=24,
    ),
    Habit(
        "skipped_step",
        "an update that one rank leaves out",
        "all ranks do the same updates",
        Outcome.REFUSED,
        text="differ",
        repeats=24,
    ),
    Habit(
        "init_process_group",
        "`init_process_group`",
        "replace it by `init` of `rekindle.training.torch`, with the same arguments",
        Outcome.REFUSED,
        text="replace init_process_group by rekindle.training.torch.init",
        repeats=-1,
    ),
    Habit(
        "ddp_wrapper",
        "a model in a DDP wrapper",
        "import `DistributedDataParallel` from `rekindle.training.torch`, or give the module "
        "itself, and `ddp=True`",
        Outcome.REFUSED,
        text="Session(model=module, ddp=True)",
        repeats=-1,
    ),
    Habit(
        "uneven_inputs",
        "uneven inputs, DDP's `join()`",
        "give all ranks the same number of batches, as `DistributedSampler` does",
        Outcome.REFUSED,
        text="join() is for ranks with different numbers of batches",
        repeats=-1,
    ),
    Habit(
        "seeded_in_extra",
        "a generator that each rank seeds with its number, in `extra=`",
        "`per_rank=`: [State of one rank](session.md#state-of-one-rank)",
        Outcome.REFUSED,
        text="give per_rank={'generator': ...} instead",
        repeats=-1,
    ),
    Habit(
        "early_leave",
        "a loop that one rank leaves",
        "all ranks leave it at the same step",
        Outcome.REFUSED,
        text="rank 0 leaves its loop after step 6 of 24 ... before the others had finished",
        repeats=24,
    ),
)
