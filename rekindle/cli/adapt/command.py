"""Implement `rekindle adapt`: the diff that gives a script a Session, and what it leaves open."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import libcst as cst

from rekindle.cli.adapt.edits import Change, Edits
from rekindle.cli.adapt.script import INIT, SESSION, WRAPPERS, Loop, Scope, Script, range_of
from rekindle.cli.adapt.training import EMA, Note, Training, UnknownLoopError, call_of_another_file
from rekindle.console import say
from rekindle.errors import UsageError

_WRAPPER = "DistributedDataParallel"

# Calls that a Session does not allow as they are, and the remedy.
_REFUSED = {
    "torch.multiprocessing.spawn": "`rekindle run --nproc-per-node N` starts the ranks: call the "
    'function directly, with int(os.environ["LOCAL_RANK"]) as its rank on this machine',
    "torch.distributed.new_group": "a group ends with its generation: create it in the function "
    "make_groups= of the Session",
    "torch.distributed.fsdp.FullyShardedDataParallel": "use fully_shard(), or a restart of all "
    "ranks without a Session (scripts.md)",
    "torch.distributed.optim.ZeroRedundancyOptimizer": "see ZeroRedundancyOptimizer in session.md",
    "apex.parallel.DistributedDataParallel": "use torch's DistributedDataParallel",
    "torch.distributed.rpc.init_rpc": "run the script without a Session: it cannot restore RPC",
    "torch.distributed.fsdp.fully_shard": "see FSDP2 in session.md",
    "torch.distributed.tensor.parallel.parallelize_module": "see shards in session.md",
    "deepspeed.initialize": "it owns the loop: run the script without a Session (scripts.md)",
    "accelerate.Accelerator": "it owns the loop: run the script without a Session (scripts.md)",
    "horovod.torch.init": "use torch.distributed",
}
_SPREADS = WRAPPERS | {name for name in _REFUSED if name.startswith("torch.distributed.")}
_LOCAL_STATE = re.compile(r"^(update|append|extend|add|add_)$")
_PLAIN_OUTPUT = re.compile(r"log|writer|wandb|bar|print|timer", re.IGNORECASE)
_CLOCK = re.compile(r"time\(|perf_counter|monotonic|Event\(")
_RESUME = re.compile(r"(load|resume|restore|restart)\w*(checkpoint|snapshot|ckpt|state|training)")
_IMPORTS = (cst.Import, cst.ImportFrom)
_ORDERS = (cst.GreaterThanEqual, cst.GreaterThan, cst.LessThan, cst.LessThanEqual)
_ADAPTED = re.compile(r"\.(batches|steps|epochs)$")


class Adapted(NamedTuple):
    """The text of a script with a Session, and what a person must look at."""

    text: bytes
    notes: list[Note]


def run(options: argparse.Namespace) -> int:
    """Print the diff, and return the exit status: 1 if a person must add something.

    Raises UsageError: the file cannot be read or written, is no Python, or trains nothing.
    """
    path = Path(options.file)
    try:
        before = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        found = adapt(before)
    except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError) as error:
        where = f":{error.raw_line}" if isinstance(error, cst.ParserSyntaxError) else ""
        raise UsageError(f"{path}{where}: this is no Python") from error
    if found is None:
        raise UsageError(
            f"{path}: no training loop: no loop of this file has a backward pass, or gives an "
            "optimizer to a function that trains"
        )
    sys.stdout.flush()
    sys.stdout.buffer.write(diff(before, found.text, options.file))
    sys.stdout.buffer.flush()
    for note in sorted(found.notes, key=lambda each: each.line):
        say(f"{path}:{note.line}: {'' if note.open else 'check: '}{note.text}")
    if options.write and found.text != before:
        try:
            path.write_bytes(found.text)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return int(any(each.open for each in found.notes))


def diff(before: bytes, after: bytes, name: str) -> bytes:
    """Return the unified diff of a file, as `patch` reads it."""
    old, new = (_split(text) for text in (before, after))
    pairs = difflib.diff_bytes(
        difflib.unified_diff, old, new, name.encode(), name.encode(), lineterm=b"\n"
    )
    mark = b"\n\\ No newline at end of file\n"
    return b"".join(line if line.endswith(b"\n") else line + mark for line in pairs)


def _split(text: bytes) -> list[bytes]:
    *whole, rest = text.split(b"\n")  # not splitlines(), which breaks at other characters too
    return [*(each + b"\n" for each in whole), *([rest] if rest else [])]


def adapt(text: bytes) -> Adapted | None:
    """Change a script. None: it has no training loop. Raises ParserSyntaxError: no Python."""
    script = Script(text)
    if SESSION in script.imports.values() or any(
        _ADAPTED.search(script.name(each.func)) and "session" in script.name(each.func)
        for each in script.calls
    ):
        return Adapted(text, [Note(1, "this file has a Session: nothing to change", open=False)])
    loops = script.training_loops()
    remote = None if loops else call_of_another_file(script)
    if remote is not None:
        loops = script.loops(remote)[:1]
    if not loops:
        return _without_loop(script, text)
    if len(loops) > 1:
        lines = ", ".join(str(script.line(each)) for each in loops)
        problem = f"the loops of lines {lines} train: a Session has one loop. Adapt one by hand"
        return Adapted(text, [Note(script.line(loops[1]), f"nothing changed: {problem}")])
    return _changed(script, text, loops[0], remote)


def _changed(script: Script, text: bytes, loop: Loop, remote: cst.Call | None) -> Adapted:
    try:
        change = Change(script, loop, remote)
    except UnknownLoopError as error:
        return Adapted(text, [*error.notes, *_refused(script)])
    names = {"Session": change.kind} if change.kept is not None else {}
    new = _with_group(Script(change.edits.text()), names)
    return Adapted(new, list(dict.fromkeys([*change.notes, *_open(script, change)])))


def _without_loop(script: Script, text: bytes) -> Adapted | None:
    frameworks = [each for each in script.calls if script.is_framework(each)]
    if not frameworks:
        return None
    problem = (
        f"nothing changed: {script.name(frameworks[0].func)}: a framework does the backward pass, "
        "and owns the loop. Run the script without a Session; a fault then restarts all ranks"
    )
    return Adapted(text, [Note(script.line(frameworks[0]), problem)])


def _with_group(script: Script, names: dict[str, str]) -> bytes:
    """Replace torch's group and wrapper. names: what to import, each with its name here."""
    edits = Edits(script)
    init = edits.fresh("init", "init_ranks")
    for node in script.nodes:
        imports = [each for each in script.above(node) if isinstance(each, _IMPORTS)]
        if imports or not isinstance(node, cst.Name | cst.Attribute):
            continue
        if script.full(node) in INIT:
            names["init"] = init
            edits.replace(node, init)
        elif script.full(node) in WRAPPERS:
            names.setdefault(_WRAPPER, _WRAPPER)
            if isinstance(node, cst.Attribute):
                edits.replace(node, _WRAPPER)
    place = _without_imports(script, edits, names)
    if names:
        pairs = sorted(names.items())
        listed = ", ".join(name if name == new else f"{name} as {new}" for name, new in pairs)
        added = edits.statement(f"from rekindle.training.torch import {listed}\n")
        if place is not None:
            edits.edit(place, lambda old: added.with_changes(leading_lines=old.leading_lines))
        else:
            edits.edit(_last_import(script), lambda old: cst.FlattenSentinel([old, added]))
    return edits.text()


def _without_imports(script: Script, edits: Edits, names: dict[str, str]) -> cst.CSTNode | None:
    """Remove torch's names from the imports. Return a line that is free now, if there is one."""
    place: cst.CSTNode | None = None
    for node in script.nodes:
        if not isinstance(node, cst.ImportFrom) or isinstance(node.names, cst.ImportStar):
            continue
        module = script.name(node.module) if node.module else ""
        full = {each: f"{module}.{script.name(each.name)}" for each in node.names}
        rest = [each for each in node.names if full[each] not in WRAPPERS | INIT]
        for each in node.names:
            if each.asname is not None and full[each] in WRAPPERS:
                names[_WRAPPER] = script.name(each.asname.name)
        line = script.parent(node)
        if len(rest) == len(node.names) or line is None:
            continue
        if rest:
            edits.edit(node, partial(_only, rest))
        elif place is None and isinstance(script.parent(line), cst.Module):
            place = line
        else:
            edits.edit(line, lambda _: cst.RemoveFromParent())
    return place


def _only(names: Sequence[cst.ImportAlias], old: cst.ImportFrom) -> cst.ImportFrom:
    last = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return old.with_changes(names=[*names[:-1], last])


def _last_import(script: Script) -> cst.CSTNode:
    """Return the top-level statement after which a new import belongs: the last one of torch."""
    lines = [each for each in script.module.body if isinstance(each, cst.SimpleStatementLine)]
    imports = [each for each in lines if isinstance(each.body[0], _IMPORTS)]
    of_torch = [each for each in imports if re.match("(import|from) torch", script.code(each))]
    if imports:
        return (of_torch or imports)[-1]
    return script.module.body[0]


def _open(script: Script, change: Change) -> Iterator[Note]:
    """Yield what a person must look at in a script that changes."""
    outer, loop = change.training.outer, change.loop
    yield from _refused(script)
    yield from _second_wrapper(script, change)
    yield from _of_file(script, None if change.is_part else change.training)
    yield from _of_block(script, change.block, loop)
    yield from _of_values(script, loop, change, change.block)
    if outer is not loop or change.remote:
        yield from _between(script, change.training)
        yield from _of_values(script, outer, change, list(outer.body.body))


def _second_wrapper(script: Script, change: Change) -> Iterator[Note]:
    model = change.kept.model if change.kept is not None else None
    for name, target, statement in script.targets(script.nodes):
        value = statement.value if isinstance(statement, cst.Assign) else target
        wraps = isinstance(value, cst.Call) and script.full(value.func) in WRAPPERS
        if wraps and model and name != model and script.scope(statement) is change.training.scope:
            problem = f"{name}: only the model of a Session may be a DistributedDataParallel"
            yield Note(script.line(statement), f"{problem}; use the bare module here")


def _refused(script: Script) -> Iterator[Note]:
    for call in script.calls:
        if (name := script.full(call.func)) in _REFUSED:
            yield Note(script.line(call), f"{script.name(call.func)}: {_REFUSED[name]}")


def _of_file(script: Script, training: Training | None) -> Iterator[Note]:
    """Yield what concerns the ranks, their group, and the script's own checkpoints.

    training: None if another file makes the model and the process group.
    """
    if training is None:
        pass
    elif not any(script.full(each) in _SPREADS for each in script.nodes):
        yield Note(
            script.line(training.loop),
            "this file wraps no model in DistributedDataParallel: with more than one rank each "
            "would train alone. Wrap the model in that of rekindle.training.torch, and give the "
            "loader a DistributedSampler",
        )
    elif not any(script.full(each) in INIT for each in script.nodes):
        yield Note(
            1,
            "this file does not call init_process_group: where another file does, call "
            "rekindle.training.torch.init() in its place",
        )
    yield from _own_checkpoints(script)
    for node in script.nodes:
        if isinstance(node, cst.Attribute) and node.attr.value == "require_backward_grad_sync":
            yield Note(
                script.line(node),
                "require_backward_grad_sync: use `with model.no_sync():` for all backward passes "
                "of a step but the last one",
            )


def _own_checkpoints(script: Script) -> Iterator[Note]:
    lines = [
        script.line(call)
        for call in script.calls
        if (isinstance(call.func, cst.Attribute) and call.func.attr.value == "load_state_dict")
        or _RESUME.search(script.name(call.func).rpartition(".")[2].lower())
    ]
    if lines:
        yield Note(
            min(lines),
            f"the script loads its own checkpoint ({_lines(lines)}): remove this for a resume, "
            "which --checkpoint-every does. Keep it only for weights of another run; the epochs or "
            "steps then begin at 0. Lines that save a file may stay",
        )


def _of_block(script: Script, body: Sequence[cst.CSTNode], loop: Loop) -> Iterator[Note]:
    """Yield what the block of a step does not repeat, or must not have.

    body: the statements of the block.
    """
    for statement in body:
        if isinstance(statement, cst.FunctionDef | cst.ClassDef):
            continue
        for node in script.walk(statement, nested=False):
            if isinstance(node, cst.Return | cst.Yield):
                word = "return" if isinstance(node, cst.Return) else "yield"
                yield Note(
                    script.line(node),
                    f"`{word}` in a step ends its function inside of the block: set a variable, "
                    "and leave the loop with `break` after the block",
                )
            elif isinstance(node, cst.Break) and script.loops(node)[0] is loop:
                yield Note(
                    script.line(node),
                    "`break` ends the loop after this step: all ranks must do so in the same step",
                    open=False,
                )
            elif isinstance(node, cst.Call) and re.search(
                r"(^|_)next(_|$)", script.name(node.func).rpartition(".")[2]
            ):
                yield Note(
                    script.line(node),
                    f"{script.code(node.func)}() takes the next batch: a repeated step would take "
                    "another one. Use session.batches(loader), or give its object state_dict() and "
                    "load_state_dict(), and Session(extra=...) the object",
                )
    yield from _accumulation(script, loop)


def _accumulation(script: Script, loop: Loop) -> Iterator[Note]:
    for update in script.updates(loop.body):
        tests = [each.test for each in script.above(update.call) if isinstance(each, cst.If)]
        parts = [node for test in tests for node in script.walk(test)]
        names = {script.name(node) for node in parts}
        counted = names & {name for name, *_ in script.targets(script.walk(loop.body))}
        partly = any(
            isinstance(node, cst.Modulo) or (counted and isinstance(node, _ORDERS))
            for node in parts
        )
        words = [each.keyword.value for each in update.call.args if each.keyword is not None]
        if partly or any(each in ("update_grad", "need_update") for each in words):
            yield Note(
                script.line(update.call),
                "gradients of several batches add up before an update, but each step needs one "
                "update: let the loader give all samples of an update as one batch, and loop over "
                "its parts in the step, with no_sync() for all but the last",
            )
            return


def _of_values(
    script: Script, loop: Loop, change: Change, block: Sequence[cst.CSTNode]
) -> Iterator[Note]:
    """Yield the variables that bring a value from one round of a loop to the next.

    A new process does not have these values.
    """
    scope = script.scope(loop)
    nodes = [node for each in block for node in script.walk(each, nested=False)]
    inside = set(nodes)
    found: dict[str, int] = {}
    fetched: dict[str, int] = {}
    for name, (first_set, first_read) in _uses(script, nodes).items():
        own = script.bindings(name, scope)
        before = [each for each in own if each.node not in inside] or script.bindings(name, None)
        earlier = {script.code(each.value) for each in before if each.node not in inside}
        if (
            not earlier
            or name == "_"
            or first_read > first_set
            or any(_CLOCK.search(each) for each in earlier)
        ):
            continue
        again = {script.code(each.value) for each in own if isinstance(each.value, cst.Call)}
        again &= {script.code(each.value) for each in own if each.node in inside} & earlier
        (fetched if again else found)[name] = first_read
    found = dict(_mutated(script, block, scope, inside)) | found
    for name in change.known & (found.keys() | fetched.keys()):
        found.pop(name, fetched.pop(name, None))
    if fetched:
        yield Note(
            min(fetched.values()),
            f"{', '.join(sorted(fetched))}: each step uses what the step before it has fetched, "
            "and a new process has fetched something else: fetch it in the step that uses it",
        )
    if found:
        yield Note(
            min(found.values()),
            f"{', '.join(sorted(found))} ({_lines(list(found.values()))}): a new process begins "
            "with the value from before the loop. Keep it in Session(extra=...), compute it in "
            "each step, or log it with step.log(). If it only prints, leave it",
        )


def _uses(script: Script, nodes: Sequence[cst.CSTNode]) -> dict[str, tuple[float, int]]:
    """Return the lines where names are first set and first read, of the names that are set."""
    first_set: dict[str, float] = {}
    targets: set[cst.CSTNode] = set()
    for name, target, statement in script.targets(nodes):
        plain = isinstance(statement, cst.Assign)
        first_set.setdefault(name, script.line(statement) if plain else math.inf)
        targets |= {target} if plain else set()
    reads: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, cst.Name) and node.value in first_set and node not in targets:
            reads.setdefault(node.value, script.line(node))
    return {name: (line, reads[name]) for name, line in first_set.items() if name in reads}


def _mutated(
    script: Script, block: Sequence[cst.CSTNode], scope: Scope, inside: set[cst.CSTNode]
) -> Iterator[tuple[str, int]]:
    """Yield lists, meters and other values of this function to which a block adds something."""
    for statement in block:
        for call in script.calls_in(statement):
            if isinstance(call.func, cst.Attribute) and _LOCAL_STATE.match(call.func.attr.value):
                name = script.variable(call.func.value)
                before = script.bindings(name, scope) if name else []
                made = [each for each in before if each.node not in inside]
                if (
                    made
                    and not _PLAIN_OUTPUT.search(name)
                    and not EMA.search(name)
                    and not any(name == (each.scaler or "") for each in script.updates(statement))
                ):
                    yield name, script.line(call)


def _between(script: Script, training: Training) -> Iterator[Note]:
    """Yield work between the epochs that a fault would interrupt without a repetition."""
    outer = training.outer
    skipped = set(script.walk(training.loop)) if training.loop is not outer else set()
    for node in script.walk(outer.body, nested=False):
        if node in skipped:
            continue
        if isinstance(node, cst.For) and range_of(script, node.iter) is None:
            if re.search(r"load|batch", script.code(node.iter)):
                yield Note(
                    script.line(node),
                    "this loop between two epochs is not in a function: move it into one, and call "
                    "session.run(function, ...), which repeats it on all ranks after a fault",
                )
        elif isinstance(node, cst.Call) and re.search(
            r"^torch\.distributed\.\w*(reduce|gather|broadcast|scatter)", script.full(node.func)
        ):
            yield Note(
                script.line(node),
                f"{script.name(node.func)} between two epochs: move it into a function, and call "
                "session.run(function, ...)",
            )


def _lines(lines: Sequence[int]) -> str:
    different = sorted(set(lines))
    word = "line" if len(different) == 1 else "lines"
    return f"{word} {', '.join(str(each) for each in different)}"
