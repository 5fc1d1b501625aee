"""Change a training script: its group, its loops, and the Session around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from rekindle.cli.adapt.script import Loop, Script
from rekindle.cli.adapt.training import (
    Kept,
    Note,
    Rounds,
    Training,
    UnknownLoopError,
    find_kept,
    is_evaluation,
    loop_of_epochs,
    needs_group,
    note_of_one_epoch,
    notes_of_place,
    on_one_rank,
    rounds,
    steps_of,
)

_LINE = 99  # characters of a line that the diff adds

# Functions that pass the items of their first argument on, one at a time.
_PASS_ON = ("tqdm", "track", "progress_bar", "alive_it")
_REMEDIES = {
    "zip": "write one loader that yields the batches of all",
    "islice": "loop over all batches, and `break` after the block of the last one",
    "cycle": "loop over the epochs, and in each over the loader",
    "count": "write `for number in range(total):`, because a Session counts to an end",
}
_LOADER = re.compile(r"load|data|batch|iter", re.IGNORECASE)


class Edits(cst.CSTTransformer):
    """Edits of a script: functions of nodes. changed: the new node of each old one."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.changed: dict[cst.CSTNode, Any] = {}
        self._edits: dict[cst.CSTNode, list[Callable[[Any], Any]]] = {}

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        """Change a node whose children have changed."""
        new: Any = super().on_leave(original_node, updated_node)
        for edit in self._edits.get(original_node, ()):
            new = edit(new)
        self.changed[original_node] = new
        return new

    def text(self) -> bytes:
        """Return the changed script."""
        return self.script.module.visit(self).bytes

    def edit(self, node: cst.CSTNode, edit: Callable[[Any], Any]) -> None:
        """Let a function change a node."""
        self._edits.setdefault(node, []).append(edit)

    def has(self, node: cst.CSTNode) -> bool:
        """Return whether a node changes."""
        return node in self._edits

    def replace(self, node: cst.CSTNode, code: str) -> None:
        """Replace a node by an expression."""
        self.edit(node, lambda _: self.expression(code))

    def fresh(self, *names: str) -> str:
        """Return the first of the names that the script does not have."""
        free = (each for each in names if each not in self.script.words)
        return next(free, f"rekindle_{names[0]}")

    def expression(self, code: str) -> cst.BaseExpression:
        """Parse an expression."""
        return cst.parse_expression(code, config=self.script.module.config_for_parsing)

    def statement(self, code: str) -> Any:
        """Parse a statement."""
        return cst.parse_statement(code, config=self.script.module.config_for_parsing)


class Change:
    """The edits of one script. Raises UnknownLoopError: a part that they need is not there.

    loop: the loop with one update in each round; with `remote` the loop of the epochs.
    remote: the call of another file's function that trains an epoch.
    """

    def __init__(self, script: Script, loop: Loop, remote: cst.Call | None) -> None:
        self.script = script
        self.loop = loop
        self.remote = remote
        self.notes: list[Note] = []
        self.edits = Edits(script)
        self.session = self.edits.fresh("session", "training_session")
        self.kind = self.edits.fresh("Session", "TrainingSession")
        self._numbered = False  # the loop takes pairs from enumerate()
        self._before: list[Any] = []  # statements of a round before its block
        self.steps = None if remote else steps_of(script, loop)
        outer, calls = (loop, ()) if remote else loop_of_epochs(script, loop, self.steps)
        self.training = Training(loop, outer, calls, script.scope(outer))
        self.kept = None if self.is_part else find_kept(script, self.training)
        if self.kept is None and not self.is_part:
            problem = "no model or no optimizer is a variable where the loop is"
            raise UnknownLoopError(script.line(outer), problem)
        self.block = self._loops()
        if self.kept is not None:
            self._wrap(self.kept)

    @property
    def is_part(self) -> bool:
        """Return whether the loop is in a function that only another file calls."""
        scope = self.training.scope
        return (
            self.remote is None
            and self.steps is None
            and self.training.outer is self.loop
            and scope is not None
            and any("optim" in each for each in self.script.parameters(scope))
        )

    @property
    def known(self) -> set[str]:
        """The names whose values the Session knows."""
        kept = self.kept
        names = {kept.model, kept.optimizer, kept.scheduler, *kept.extra} if kept else set()
        return names | ({self.steps.counter} if self.steps else set())

    def _loops(self) -> list[cst.CSTNode]:
        """Change the loops. Return the statements of the block."""
        if self.steps is not None:
            return self._steps_loop(self.steps)
        if self.remote is None:
            return self._batches_loop()
        self._epochs(self.loop)
        name = self.script.name(self.remote.func)
        self._give(self.remote)
        self._evaluations(_statements(self.loop.body), repeated=True)
        problem = f"{name} is in another file: adapt that one too. It gets the Session first"
        self.notes.append(Note(self.script.line(self.remote), problem))
        return []

    def _batches_loop(self) -> list[cst.CSTNode]:
        """Change the loops over epochs and batches. Return the statements of the block."""
        script, outer, loop = self.script, self.training.outer, self.loop
        assert isinstance(loop, cst.For)
        if self.is_part:
            self._take()
        elif outer is loop:
            self.edits.edit(loop, self._in_one_epoch)
            self.notes += note_of_one_epoch(script, self.training)
        else:
            self._epochs(outer)
        loader = self._iterable(loop.iter)
        name = script.name(loader.func).rpartition(".")[2] if isinstance(loader, cst.Call) else ""
        if name in _REMEDIES:
            problem = f"{name}() in a loop over batches: {_REMEDIES[name]}"
            self.notes.append(Note(script.line(loop), problem))
        self._loader(loader)
        for call in self.training.calls:
            self._pass_session(call)
        statements = _statements(loop.body)
        after = _end_of_block(script, loop)
        self.edits.edit(loop.body, lambda body: self._block(body, f"{self.session}.step()", after))
        self._evaluations(statements[after:], repeated=True)
        self._evaluations(statements[:after], repeated=False)
        if outer is not loop:
            self._evaluations(_statements(outer.body), repeated=True)
        return statements[:after]

    def _epochs(self, outer: Loop) -> None:
        found = rounds(self.script, outer)
        assert isinstance(outer, cst.For)
        call = next(
            each
            for each in self.script.walk(outer.iter)
            if isinstance(each, cst.Call) and self.script.name(each.func).endswith("range")
        )
        self.edits.replace(call, f"{self.session}.epochs({found.total})")
        self.notes += [found.note] if found.note else []
        if found.first:
            shift = self.edits.statement(f"{found.counter} += {found.first}\n")
            self.edits.edit(outer.body, lambda body: body.with_changes(body=[shift, *body.body]))

    def _in_one_epoch(self, loop: cst.For) -> cst.For:
        around: cst.For = self.edits.statement(f"for _ in {self.session}.epochs(1):\n    pass\n")
        inside = cst.IndentedBlock(body=[loop.with_changes(leading_lines=())])
        return around.with_changes(body=inside, leading_lines=loop.leading_lines)

    def _iterable(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return the expression of the loader inside of enumerate(), progress bars and names."""
        script = self.script
        if isinstance(node, cst.Name):
            for each in script.bindings(node.value, script.scope(self.loop)):
                inside = isinstance(each.value, cst.Call) and self.training.outer in [
                    *script.above(each.node),
                    *(script.above(self.training.calls[0]) if self.training.calls else ()),
                ]
                if inside and self._passed_on(each.value) is not None:
                    return self._iterable(each.value)
            return node
        inner = self._passed_on(node)
        if inner is None:
            return node
        if isinstance(node, cst.Call) and script.name(node.func) == "enumerate":
            self._number(node)
        return self._iterable(inner)

    def _passed_on(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return the iterable whose items a call passes on."""
        if not isinstance(node, cst.Call) or not node.args:
            return None
        script, first = self.script, node.args[0].value
        name = script.name(node.func).rpartition(".")[2]
        if name in (*_PASS_ON, "enumerate"):
            return first
        is_loader = script.variable(first) and _LOADER.search(script.variable(first))
        if is_loader and isinstance(node.func, cst.Attribute):
            self.notes.append(
                Note(
                    script.line(node),
                    f"{script.name(node.func)}() gets session.batches(...), an iterator: it must "
                    "pass each batch on before it takes the next one",
                    open=False,
                )
            )
            return first
        return None

    def _number(self, call: cst.Call) -> None:
        """Take the number of a batch from the Session, which knows the position in the epoch."""
        self._numbered = True
        self.edits.edit(call, lambda new: new.args[0].value)
        start = self.script.code(call.args[1].value) if len(call.args) > 1 else "0"
        target = self.loop.target if isinstance(self.loop, cst.For) else None
        if start != "0" and isinstance(target, cst.Tuple):
            number = self.script.code(target.elements[0].value)
            self._before = [self.edits.statement(f"{number} += {start}\n")]
        elif start != "0":
            problem = f"the numbers of the batches begin at {start} here, and at 0 in the Session"
            self.notes.append(Note(self.script.line(call), problem))

    def _loader(self, node: cst.BaseExpression) -> None:
        function = self.edits.expression(f"{self.session}.batches")
        numbered = cst.Arg(keyword=cst.Name("numbered"), value=cst.Name("True"), equal=_tight())
        more = [numbered] if self._numbered else []
        self.edits.edit(node, lambda new: cst.Call(func=function, args=[cst.Arg(value=new), *more]))

    def _pass_session(self, call: cst.Call) -> None:
        function = self.script.callee(call)
        assert function is not None
        self._give(call)
        self._add_parameter(function)
        for other in self.script.calls_of(function):
            if other is not call:
                problem = f"this call of {function.name.value} needs the Session as first argument"
                self.notes.append(Note(self.script.line(other), problem))

    def _give(self, call: cst.Call) -> None:
        first = cst.Arg(value=cst.Name(self.session))
        self.edits.edit(call, lambda new: new.with_changes(args=[first, *new.args]))

    def _add_parameter(self, function: cst.FunctionDef) -> None:
        place = 1 if self.script.owner(function) is not None else 0
        added = cst.Param(name=cst.Name(self.session))

        def changed(new: cst.Parameters) -> cst.Parameters:
            return new.with_changes(params=[*new.params[:place], added, *new.params[place:]])

        self.edits.edit(function.params, changed)

    def _take(self) -> None:
        """Let the function of the loop take a Session from its caller in another file."""
        function = self.training.scope
        assert function is not None
        self._add_parameter(function)
        self.notes.append(
            Note(
                self.script.line(function),
                f"{function.name.value} gets the Session as first argument: adapt the file that "
                "calls it too",
            )
        )

    def _evaluations(self, statements: Sequence[cst.CSTNode], *, repeated: bool) -> None:
        """Repeat evaluations between blocks on all ranks; give others the time that they need."""
        script, outer = self.script, self.training.outer
        for call in (call for each in statements for call in script.calls_in(each)):
            if self.edits.has(call) or (
                self.loop in statements and self.loop in script.above(call)
            ):
                continue
            wait = script.full(call.func) == "torch.distributed.barrier"
            if repeated and (wait or is_evaluation(script, call)):
                if not on_one_rank(script, call, outer):
                    self.edits.edit(call, self._repeated)
                    continue
            if is_evaluation(script, call):
                self._in_phase(call)

    def _repeated(self, call: cst.Call) -> cst.Call:
        function = self.edits.expression(f"{self.session}.run")
        return call.with_changes(func=function, args=[cst.Arg(value=call.func), *call.args])

    def _in_phase(self, call: cst.Call) -> None:
        line = next((each for each in self.script.above(call) if _is_line(each)), None)
        if line is None or self.edits.has(line):
            return
        around = self.edits.statement(f'with {self.session}.phase("evaluate"):\n    pass\n')
        self.edits.edit(line, lambda new: _inside(around, [new]))

    def _block(self, body: cst.BaseSuite, manager: str, after: int) -> cst.IndentedBlock:
        """Put the first statements of a loop into a block."""
        block = _indented(body)
        inside = cst.IndentedBlock(body=block.body[:after])
        if after == len(block.body):
            inside, block = inside.with_changes(footer=block.footer), block.with_changes(footer=())
        around: cst.With = self.edits.statement(f"with {manager}:\n    pass\n")
        around = around.with_changes(body=inside)
        return block.with_changes(body=[*self._before, around, *block.body[after:]])

    def _steps_loop(self, steps: Rounds) -> list[cst.CSTNode]:
        """Make a loop over session.steps(total). Return the statements of the block."""
        script, loop = self.script, self.loop
        step = self.edits.fresh("step", "this_step")
        statements = [each for each in _statements(loop.body) if each not in steps.done]
        for each in steps.done:
            self.edits.edit(each, lambda _: cst.RemoveFromParent())
        self._evaluations(statements, repeated=False)
        self.notes += [steps.note] if steps.note else []
        number = f"{step}.number + {steps.first}" if steps.first else f"{step}.number"
        used = steps.counter != "_" and any(
            script.name(node) == steps.counter for each in statements for node in script.walk(each)
        )
        self._before = [self.edits.statement(f"{steps.counter} = {number}\n")] if used else []

        def changed(old: cst.For | cst.While) -> cst.For:
            body = self._block(old.body, step, len(_indented(old.body).body))
            new: cst.For = self.edits.statement(
                f"for {step} in {self.session}.steps({steps.total}):\n    pass\n"
            )
            return new.with_changes(
                body=body,
                leading_lines=old.leading_lines,
                orelse=old.orelse,
            )

        self.edits.edit(loop, changed)
        return statements

    def _wrap(self, kept: Kept) -> None:
        """Put the outer loop, and what needs the process group after it, into a Session."""
        outer = self.training.outer
        block = self.script.block(outer)
        places = list(block.body)
        first = places.index(outer)
        last = first
        for place in range(first + 1, len(places)):
            if needs_group(self.script, places[place]):
                last = place
        wrapped = places[first : last + 1]
        self.notes += notes_of_place(self.script, self.training, wrapped)
        template = self._session(kept)

        def with_session(new: Any) -> Any:
            changed = [self.edits.changed[each] for each in wrapped]
            start = next(i for i, each in enumerate(new.body) if each is changed[0])
            end = next(i for i, each in enumerate(new.body) if each is changed[-1])
            around = _inside(template, new.body[start : end + 1])
            return new.with_changes(body=[*new.body[:start], around, *new.body[end + 1 :]])

        self.edits.edit(block, with_session)

    def _session(self, kept: Kept) -> cst.With:
        arguments = [f"model={kept.model}", f"optimizer={kept.optimizer}"]
        if kept.scheduler:
            arguments.append(f"scheduler={kept.scheduler}")
        if kept.extra:
            pairs = ", ".join(f'"{each.removeprefix("self.")}": {each}' for each in kept.extra)
            if not kept.optional:
                arguments.append(f"extra={{{pairs}}}")
            elif len(kept.extra) == 1:
                arguments.append(f"extra={{{pairs}}} if {kept.extra[0]} is not None else None")
            else:
                some = f"{{name: each for name, each in {{{pairs}}}.items() if each is not None}}"
                arguments.append(f"extra={some}")
        above = self.script.above(self.training.outer)
        room = _LINE - 4 * sum(isinstance(each, cst.IndentedBlock) for each in above)
        inside, end = ", ".join(arguments), f" as {self.session}:\n    pass\n"
        line = f"with {self.kind}({inside}){end}"
        if len(line.partition("\n")[0]) > room:
            lines = [inside] if len(inside) + 4 <= room else [f"{each}," for each in arguments]
            line = "".join(
                (f"with {self.kind}(\n", *(f"    {each}\n" for each in lines), f"){end}")
            )
        found: cst.With = self.edits.statement(line)
        return found


def _statements(body: cst.BaseSuite) -> list[cst.CSTNode]:
    return list(body.body)


def _is_line(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine)


def _indented(body: cst.BaseSuite) -> cst.IndentedBlock:
    """Return a body on lines of its own."""
    if isinstance(body, cst.IndentedBlock):
        return body
    assert isinstance(body, cst.SimpleStatementSuite)
    return cst.IndentedBlock(body=[cst.SimpleStatementLine(body=body.body)])


def _inside(around: cst.With, statements: Sequence[Any]) -> cst.With:
    """Put statements into a `with` statement, below their comments."""
    first = statements[0].with_changes(leading_lines=())
    body = cst.IndentedBlock(body=[first, *statements[1:]])
    return around.with_changes(body=body, leading_lines=statements[0].leading_lines)


def _tight() -> cst.AssignEqual:
    space = cst.SimpleWhitespace("")
    return cst.AssignEqual(whitespace_before=space, whitespace_after=space)


def _end_of_block(script: Script, loop: Loop) -> int:
    """Return the place of the first statement after the block: an evaluation by all ranks."""
    body = list(loop.body.body)
    updates = [place for place, each in enumerate(body) if script.updates(each)]
    for place in range(max(updates, default=len(body)) + 1, len(body)):
        for call in script.calls_in(body[place]):
            if is_evaluation(script, call) and not on_one_rank(script, call, loop):
                return place
    return len(body)
