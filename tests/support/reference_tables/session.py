"""The page of the Sessions' arguments, from the signatures and docstrings in the source."""

from __future__ import annotations

import ast

from docstrings import explained
from repository import ROOT

from reference_tables.markdown import check_names, code, codes, page, sentence, table

_UNITS = {"epoch": "epochs", "timeout_s": "seconds", "total": "steps"}
_HEADS = ("Argument", "Type", "Unit", "Default", "Meaning")


def session() -> str:
    """Return the page of Session arguments.

    Raises ValueError: a docstring lacks an argument.
    """
    torch, mindspore = _session_in("torch"), _session_in("mindspore")
    return page(
        "Session arguments",
        "This page lists the arguments of the two Sessions and of their methods, and the errors of "
        "wrong arguments. The Session in a training script ([PyTorch](../train/session.md), "
        "[MindSpore](../train/mindspore.md)) has the rules, examples and attributes. The API has "
        "the methods, [for PyTorch](api/torch.md) and [for MindSpore](api/mindspore.md).",
        "## Session of rekindle.training.torch",
        "All arguments of the constructor are given by name: `Session(model=model, "
        "optimizer=optimizer)`. `steps` and `phase` also take theirs by position: "
        "`session.steps(1000)`.",
        _arguments(torch, "__init__"),
        "### Errors",
        "Each of these raises `rekindle.errors.SessionError` in the script. Like every error of "
        "the script it ends the rank; `max_restarts` decides whether all ranks restart.",
        table(("Mistake", "What to do"), _MISTAKES),
        "The Session does not check the type of `sampler` and `scheduler`. A `sampler` of another "
        "type raises `AttributeError` when the ranks meet. A `scheduler` without `state_dict()` "
        "raises it when the state is first read, usually at the first snapshot.",
        "### steps",
        _arguments(torch, "steps"),
        "The iterator yields only the remaining steps, as `Step` objects. If the job has finished "
        "`total` steps already, it yields none.",
        "### phase",
        _arguments(torch, "phase"),
        "Another name raises `SessionError`. `session.phase` returns a context manager: "
        '`with session.phase("evaluate"):`.',
        "### Step",
        "A `Step` has no arguments: `with step:`. It has `number` (from 0), `indices`, `batch`, "
        "`parts()` and `log(**values)`.",
        "## Session of rekindle.training.mindspore",
        "`Session(model)` and `train` take their arguments by position or by name.",
        _arguments(mindspore, "__init__"),
        "### train",
        _arguments(mindspore, "train"),
        "Call `train` once. A second call, `dataset_sink_mode=True` on another device than an "
        "NPU, an `epoch` below 1, an empty dataset, and other parameters or another number of "
        "steps on another rank raise `SessionError`.",
        "### phase",
        _arguments(mindspore, "phase"),
        "Another name raises `SessionError`.",
    )


def _refused_of_ddp() -> list[str]:
    """Return the arguments of DDP that a Session refuses.

    The source is read, because the import of torch is slow.
    """
    path = ROOT / "rekindle" / "training" / "torch" / "groups" / "ddp.py"
    return [
        name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_OURS", "_ONCE_ONLY")
        for name in ast.literal_eval(node.value)
    ]


# Mistakes that a torch Session refuses.
_MISTAKES = (
    (
        "`model` is a DistributedDataParallel of torch",
        "import that name from `rekindle.training.torch`, or give the module itself and `ddp=True`",
    ),
    (
        "`model` is a `torch.compile` around a DistributedDataParallel",
        "`DistributedDataParallel(torch.compile(module))`",
    ),
    (
        "`ddp={...}`, and `model` is a DistributedDataParallel of Rekindle",
        "give the arguments to DistributedDataParallel",
    ),
    ("`optimizer` is not a `torch.optim.Optimizer`", "give others in `extra`"),
    (
        "a default process group exists",
        "replace `init_process_group` by `rekindle.training.torch.init`, or remove it",
    ),
    (
        f"`ddp` has one of {codes(_refused_of_ddp())}",
        "leave it out: the wrapper could not survive a new generation",
    ),
    (
        "`extra` has a name that the Session uses: `model`, `optimizer`, `scheduler`, `sampler` or "
        "`loader`, if that object is given",
        "choose another name",
    ),
    (
        "`loader` is a DataLoader without a StepSampler or an ElasticStream, or has "
        "`in_order=False`",
        "[data](../train/data.md)",
    ),
    (
        "`sampler` and a `loader` that does not read it",
        "give only the loader, with `batch_sampler=sampler`",
    ),
    ("`shard` is not an integer from 0", "give the number of a piece"),
    (
        "`shard` with `ddp` or `keep_global_batch=True`",
        "leave one out: these need the whole state on every rank",
    ),
    ("`keep_global_batch=True` without a StepSampler", "give `sampler`, or a loader over one"),
    ('`keep_global_batch=True` with `ddp={"static_graph": True}`', "leave `static_graph` out"),
    (
        "`step.indices` or `step.batch` with `keep_global_batch=True`",
        "loop over `step.parts()`; multiply the loss by `part.weight`",
    ),
    (
        "a model of `fully_shard()` with torch older than 2.13, or an optimizer that was made "
        "before `fully_shard()`",
        "[FSDP2](../train/session.md#fsdp2-and-hsdp)",
    ),
    ("`ZeroRedundancyOptimizer(overlap_with_ddp=True)`", "leave `overlap_with_ddp` out"),
    (
        "a state that cannot be saved, such as a NumPy array or a set",
        "[State](../train/session.md#state); the first snapshot raises it",
    ),
)


def _session_in(framework: str) -> ast.ClassDef:
    """Return the class of a framework from its source, because MindSpore is not installed here."""
    path = ROOT / "rekindle" / "training" / framework / "session.py"
    body = ast.parse(path.read_text()).body
    return next(n for n in body if isinstance(n, ast.ClassDef) and n.name == "Session")


def _arguments(session: ast.ClassDef, method: str) -> str:
    function = next(n for n in session.body if isinstance(n, ast.FunctionDef) and n.name == method)
    known = explained(ast.get_docstring(session if method == "__init__" else function))
    found = function.args
    defaults = [*[None] * (len(found.args) - len(found.defaults)), *found.defaults]
    every = [*zip(found.args, defaults, strict=True)][1:]
    every += zip(found.kwonlyargs, found.kw_defaults, strict=True)
    names = [argument.arg for argument, _ in every]
    check_names("session", names, [name for name in known if name in names])
    return table(
        _HEADS,
        [
            (
                code(argument.arg),
                code(ast.unparse(argument.annotation)) if argument.annotation else "",
                _UNITS.get(argument.arg, ""),
                code(ast.unparse(default)) if default else "required",
                sentence(known[argument.arg]),
            )
            for argument, default in every
        ],
    )
