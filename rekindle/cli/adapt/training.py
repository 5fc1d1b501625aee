"""Find the training loop of a script, and the objects that it trains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import libcst as cst

from rekindle.cli.adapt.script import WRAPPERS, Loop, Scope, Script, range_of
from rekindle.errors import RekindleError

_RANK_GUARD = re.compile(r"rank|master|main_process|is_main|gpu|primary", re.IGNORECASE)
_EVALUATION = re.compile(r"(^|_)(eval|evaluate|evaluation|validate|validation|valid|val|test)(_|$)")
_NO_WORK = re.compile(r"^(get|make|build|create|load|is|has|should|prepare|save|log|print)_")
_STATE = re.compile(r"(Scaler|AveragedModel|ModelEma|EMA)\w*$")
EMA = re.compile(r"(^|_)(ema|swa|averaged?)(_|$)", re.IGNORECASE)
_SCHEDULER = re.compile(r"sched", re.IGNORECASE)
_OF_PARAMETERS = ("parameters", "named_parameters", "configure_optimizers")
_OF_GROUP = re.compile(r"torch\.distributed\.(?!destroy_|is_(initialized|available))")
_MOST_SOURCES = 4  # assignments between an optimizer and the model whose parameters it has

# The loop over the epochs, and the calls that lead from it to the training loop.
Around: TypeAlias = tuple[Loop, Sequence[cst.Call]]


@dataclass(frozen=True)
class Note:
    """A report to a person. open: the diff is not complete without the person's change."""

    line: int
    text: str
    open: bool = True


class UnknownLoopError(RekindleError):
    """A script that this module cannot change. notes: the reasons."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.notes = [Note(line, f"nothing changed: {problem}")]


@dataclass(frozen=True)
class Rounds:
    """The rounds of a loop that counts. note: what the diff changes about them, if anything."""

    counter: str
    first: int
    total: str
    done: Sequence[cst.CSTNode] = ()  # statements that count, or end the loop
    note: Note | None = None


@dataclass(frozen=True)
class Training:
    """A training loop. calls: lead from the function of the epochs to that of the loop."""

    loop: Loop
    outer: Loop
    calls: Sequence[cst.Call]
    scope: Scope  # the function that gets the Session


@dataclass(frozen=True)
class Kept:
    """The arguments of a Session, each a name of the script."""

    model: str
    optimizer: str
    scheduler: str
    extra: list[str]
    optional: bool  # an object of extra may be None


def find_kept(script: Script, training: Training) -> Kept | None:
    """Find the objects whose state a Session keeps; None: no model or no optimizer."""
    return _State(script, training).kept()


class _State:
    def __init__(self, script: Script, training: Training) -> None:
        self.script = script
        self.training = training
        self.scope = training.scope
        place = script.module if self.scope is None else self.scope
        owner = script.owner(self.scope)
        nodes = list(script.walk(place, nested=False))
        nodes += list(script.walk(owner)) if owner is not None else []
        self.calls = [each for each in nodes if isinstance(each, cst.Call)]
        names = dict.fromkeys(script.variable(each) for each in nodes)
        self.names = [each for each in names if each and script.exists(each, self.scope)]

    def kept(self) -> Kept | None:
        updates = dict.fromkeys(
            (self._outward(each.optimizer, each.call), self._outward(each.scaler or "", each.call))
            for each in self.script.updates(self.training.loop.body)
        )
        optimizers = list(dict.fromkeys(optimizer for optimizer, _ in updates if optimizer))
        if not optimizers:
            optimizers = [each for each in self.names if self.script.is_optimizer(each)][:1]
        model = self._model(optimizers[0]) if optimizers else ""
        if not model:
            return None
        others = self._aliases(model) | {model, optimizers[0], ""}
        found = [*optimizers[1:], *(scaler for _, scaler in updates)]
        found += [each for each in self.names if self._is_state(each)]
        stepped = [self._outward(each, call) for each, call in self._stepped()]
        known = dict.fromkeys(each for each in (*found, *stepped) if each not in others)
        rest = [each for each in known if not self._is_second_name(each, known)]
        schedulers = [each for each in rest if each in stepped or self._is_scheduler(each)]
        scheduler = schedulers[0] if schedulers else ""
        extra = [each for each in rest if each != scheduler]
        optional = any(self._may_be_none(each) for each in extra)
        return Kept(model, optimizers[0], scheduler, extra, optional)

    def _outward(self, name: str, call: cst.Call) -> str:
        """Translate a name at a call below the loop for the function of the Session."""
        path = self.script.path(self.training.loop, call)
        found = self.script.outward(name, [*self.training.calls, *path]) if name else ""
        return found if found and self.script.exists(found, self.scope) else ""

    def _stepped(self) -> Iterator[tuple[str, cst.Call]]:
        """Yield the receivers of step() and update() in the loops, which may be schedulers."""
        for call in self.script.reached(self.training.outer):
            name, method = self.script.method(call)
            if method in ("step", "step_update") and _SCHEDULER.search(name):
                yield name, call

    def _has(self, name: str, *methods: str) -> bool:
        return any(self.script.method(each) in product((name,), methods) for each in self.calls)

    def _is_state(self, name: str) -> bool:
        """Return whether the script saves an object, or what makes it says that it has a state."""
        values = [each.value for each in self.script.bindings(name, self.scope)]
        made = [self.script.full(_made_by(each)) for each in values]
        return (
            self._has(name, "state_dict")
            or self._is_scheduler(name)
            or any(
                _STATE.search(each) or (EMA.search(name) and each.endswith("deepcopy"))
                for each in made
            )
        )

    def _is_scheduler(self, name: str) -> bool:
        values = [each.value for each in self.script.bindings(name, self.scope)]
        return any(".lr_scheduler." in self.script.full(_made_by(each)) for each in values)

    def _is_second_name(self, name: str, known: Iterable[str]) -> bool:
        """Return whether another name has the same object, the bare one if a name is wrapped."""
        for other in known:
            if other != name and other in self._aliases(name):
                return is_wrapped(self.script, name, self.scope)
            if other != name and name in self._aliases(other):
                return not is_wrapped(self.script, other, self.scope)
        return False

    def _may_be_none(self, name: str) -> bool:
        values = [each.value for each in self.script.bindings(name, self.scope)]
        values += [each.orelse for each in values if isinstance(each, cst.IfExp)]
        return any(isinstance(each, cst.Name) and each.value == "None" for each in values)

    def _model(self, optimizer: str) -> str:
        sources = self._sources(optimizer)
        wrapped = [each for each in self.names if is_wrapped(self.script, each, self.scope)]
        for each in wrapped:
            if ({each} | self._sources(each)) & sources:
                return each
        calls = [self.script.method(each) for each in self.script.reached(self.training.outer)]
        trained = [name for name, method in calls if method == "train"]
        owners = [each for each in self.names if self._has(each, *_OF_PARAMETERS)]
        likely = [each for each in wrapped if each in trained] or wrapped
        likely += [each for each in owners if each in sources]
        likely += [each for each in self.names if each in trained]
        likely += [each for each in self.names if re.search(r"(^|\.|_)(model|net)$", each)]
        return next(iter(likely), "")

    def _sources(self, name: str) -> set[str]:
        """Return the names from which a value is made, over a few assignments."""
        found = {name}
        for _ in range(_MOST_SOURCES):
            found |= {
                self.script.variable(node)
                for each in list(found)
                for binding in self.script.bindings(each, self.scope)
                for node in self.script.walk(binding.value)
            } - {""}
        return (found & set(self.names)) - {name}

    def _aliases(self, model: str) -> set[str]:
        """Return the names of the bare module in a wrapper, and other names of the model."""
        known = {model}
        for each in self.script.bindings(model, self.scope):
            if isinstance(each.value, cst.Call) and self.script.full(each.value.func) in WRAPPERS:
                known.add(self.script.variable(each.value.args[0].value))
        for _ in range(_MOST_SOURCES):
            for name in self.names:
                values = [each.value for each in self.script.bindings(name, self.scope)]
                if any(self._is_alias(each, known) for each in values):
                    known.add(name)
        return known

    def _is_alias(self, value: cst.BaseExpression, known: set[str]) -> bool:
        if isinstance(value, cst.IfExp):
            return self._is_alias(value.body, known) or self._is_alias(value.orelse, known)
        return bool(name := self.script.name(value)) and name.removesuffix(".module") in known


def _made_by(value: cst.BaseExpression) -> cst.BaseExpression:
    """Return what a value calls first: `f` of `f(x).to(device)`."""
    while isinstance(value, cst.Call | cst.IfExp):
        if isinstance(value, cst.IfExp):
            value = value.body
        elif isinstance(value.func, cst.Attribute) and isinstance(value.func.value, cst.Call):
            value = value.func.value
        else:
            return value.func
    return value


def is_wrapped(script: Script, name: str, scope: Scope, deepest: int = 3) -> bool:
    """Return whether a name is a DistributedDataParallel, also one from the function's caller."""
    for each in script.bindings(name, scope):
        for node in script.walk(each.value):
            if isinstance(node, cst.Call) and script.full(node.func) in WRAPPERS:
                return True
    if scope is None or not deepest or name not in script.parameters(scope):
        return False
    outer = [(script.outward(name, [call]), script.scope(call)) for call in script.calls_of(scope)]
    return any(each and is_wrapped(script, each, where, deepest - 1) for each, where in outer)


def is_evaluation(script: Script, call: cst.Call) -> bool:
    """Return whether a call evaluates the model: by its name, or by what its function does."""
    name = script.name(call.func).rpartition(".")[2]
    if not name or name in ("eval", "train") or _NO_WORK.match(name) or script.updates(call):
        return False
    function = script.callee(call)
    calls = script.calls_in(function.body) if function is not None else []
    evaluates = any(script.method(each)[1] == "eval" for each in calls)
    return evaluates or bool(_EVALUATION.search(name))


def on_one_rank(script: Script, node: cst.CSTNode, within: cst.CSTNode) -> bool:
    """Return whether only some ranks do a statement, by the words of the conditions around it."""
    for each in script.above(node):
        if each is within:
            return False
        if isinstance(each, cst.If) and _RANK_GUARD.search(script.code(each.test)):
            return True
    return False


def needs_group(script: Script, statement: cst.CSTNode) -> bool:
    """Return whether a statement uses the process group, except to end it."""
    names = [script.full(each) for each in script.walk(statement)]
    names += [script.full(each.func) for each in script.reached(statement)]
    evaluates = any(is_evaluation(script, each) for each in script.calls_in(statement))
    return evaluates or any(_OF_GROUP.match(each) for each in names)


def note_of_one_epoch(script: Script, training: Training) -> list[Note]:
    """Return what is unknown about a function that has one loop over batches, and no epochs."""
    scope = training.scope
    if scope is None or script.calls_of(scope):
        return []
    problem = (
        f"nothing in this file calls {scope.name.value}: if it runs once for each epoch, create "
        "the Session around the epochs, and give it to this function"
    )
    return [Note(script.line(scope), problem)]


def notes_of_place(
    script: Script, training: Training, inside: Sequence[cst.CSTNode]
) -> Iterator[Note]:
    """Yield what concerns the place of the Session. inside: the statements that it holds."""
    for loop in script.loops(training.outer)[:1]:
        yield Note(script.line(loop), "this loop trains again and again: a script has one Session")
    for statement in inside:
        for call in script.reached(statement):
            if script.full(call.func).endswith(".destroy_process_group"):
                problem = "the process group ends inside of the Session here: end it after that"
                yield Note(script.line(statement), problem)
    for call in script.calls_of(training.scope) if training.scope is not None else ():
        later = list(script.block(call).body)
        here = next(i for i, each in enumerate(later) if call in script.walk(each))
        for statement in later[here + 1 :]:
            if needs_group(script, statement):
                problem = "this uses the process group after the end of the Session: move it"
                yield Note(script.line(statement), f"{problem} to the end of the `with` block")


def loop_of_epochs(script: Script, loop: Loop, steps: Rounds | None) -> Around:
    """Return the loop over the epochs; a loop of steps, or one without epochs, is its own.

    Raises UnknownLoopError: there are several, or a loop of steps is in another loop.
    """
    found = list(script.epoch_loops(loop))
    if steps and found:
        problem = (
            "a loop of steps in another loop: loop over session.epochs(...) and "
            "session.batches(loader), or over all steps in one loop"
        )
        raise UnknownLoopError(script.line(loop), problem)
    if len(found) > 1:
        lines = ", ".join(str(script.line(each[-1] if each else outer)) for outer, each in found)
        problem = (
            f"the function of the training loop is called in lines {lines}: give the training a "
            "function of its own"
        )
        raise UnknownLoopError(script.line(found[-1][0]), problem)
    return found[0] if found else (loop, ())


def steps_of(script: Script, loop: Loop) -> Rounds | None:
    """Return what a loop without a loader counts; None: it goes over a loader.

    Raises UnknownLoopError: it counts nothing, or takes its batches from an iterator.
    """
    if isinstance(loop, cst.While):
        found = _counted_while(script, loop)
        if found is None:
            problem = (
                "the loop has no counter that begins at 0 and ends it: write `for number in "
                "range(total):`, or loop over epochs and a loader"
            )
            raise UnknownLoopError(script.line(loop), problem)
        return found
    if range_of(script, loop.iter) is None:
        return None
    if any(script.name(each.func) == "next" for each in script.calls_in(loop.body)):
        problem = (
            "next() takes the batch from an iterator, and a repeated step would take another one: "
            "loop over the loader in loops over epochs"
        )
        raise UnknownLoopError(script.line(loop), problem)
    return rounds(script, loop)


def call_of_another_file(script: Script) -> cst.Call | None:
    """Return the call in a loop that trains an epoch: it gets an optimizer and is not here."""
    for call in script.calls:
        names = [script.variable(each.value) for each in call.args]
        trains = re.search(r"train|epoch", script.name(call.func).rpartition(".")[2])
        if trains and script.loops(call) and script.callee(call) is None:
            if any("optim" in each for each in names):
                return call
    return None


def rounds(script: Script, loop: Loop) -> Rounds:
    """Return the rounds of `for number in range(...)`. Raises UnknownLoopError: another loop."""
    arguments = range_of(script, loop.iter) if isinstance(loop, cst.For) else None
    if arguments is None or not isinstance(loop, cst.For):
        raise UnknownLoopError(script.line(loop), "the epochs are not `for epoch in range(...)`")
    codes = [script.code(each.value) for each in arguments]
    counter = script.code(loop.target)
    if len(codes) > 2:
        raise UnknownLoopError(script.line(loop), "a range with a step")
    if len(codes) == 1:
        return Rounds(counter, 0, codes[0])
    start, stop = codes
    if start.isdigit():
        return Rounds(counter, int(start), _less(stop, start) if int(start) else stop)
    problem = (
        f"the loop begins at {start}, and that of the Session at 0 in a new job, later at the "
        f"position of the job. Remove what sets {start}"
    )
    return Rounds(counter, 0, stop, note=Note(script.line(loop), problem))


def _counted_while(script: Script, loop: cst.While) -> Rounds | None:
    """Return the counter of a `while` loop that ends at a number of rounds."""
    body = list(loop.body.body)
    ends = [each for each in body if isinstance(each, cst.If) and _only_break(each)]
    endless = script.code(loop.test) in ("True", "1")
    for count in body:
        counter = _increment(script, count)
        over = [each for each in ends if counter and _limit(script, each.test, counter)]
        if not counter or (endless and not over):
            continue
        total = _limit(script, over[0].test if endless else loop.test, counter)
        done = [count, *over[:1]] if endless else [count]
        later = [each for each in body[body.index(count) + 1 :] if each not in done]
        names = [script.name(node) for each in later for node in script.walk(each)]
        inside = set(script.walk(loop))
        bound = script.bindings(counter, script.scope(loop))
        if total and counter not in names and [e for e in bound if e.node in inside][1:] == []:
            before = [script.code(each.value) for each in bound if each.node not in inside]
            return _first_round(script, loop, Rounds(counter, 0, total, done), before)
    return None


def _first_round(
    script: Script, loop: cst.While, found: Rounds, before: Sequence[str]
) -> Rounds | None:
    """Add the first number of a counter. before: its values before the loop."""
    if len(before) == 1 and before[0].isdigit() and int(before[0]):
        return replace(found, first=int(before[0]), total=_less(found.total, before[0]))
    problems = [
        f"the loop begins at {each}, and that of the Session at 0 in a new job. Remove this value"
        for each in before
        if each != "0"
    ]
    if any(isinstance(node, cst.Continue) for node in script.walk(loop.body, nested=False)):
        problems.append("`continue` counts a step in the diff, and no step in the script")
    note = Note(script.line(loop), "; ".join(problems)) if problems else None
    return replace(found, note=note) if before else None


def _less(total: str, first: str) -> str:
    """Return the number of rounds up to a total if a loop does not begin at 0."""
    ending = f" + {first}"
    return total.removesuffix(ending) if total.endswith(ending) else f"{total} - {first}"


def _increment(script: Script, statement: cst.CSTNode) -> str:
    """Return the name to which a statement adds 1."""
    parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    for each in parts:
        if isinstance(each, cst.AugAssign) and isinstance(each.operator, cst.AddAssign):
            if script.code(each.value) == "1":
                return script.variable(each.target)
    return ""


def _limit(script: Script, test: cst.BaseExpression, counter: str) -> str:
    """Return the number of rounds after which a comparison of the counter ends a loop."""
    if not isinstance(test, cst.Comparison) or script.name(test.left) != counter:
        return ""
    (right,) = test.comparisons[:1]
    limit = script.code(right.comparator)
    if isinstance(right.operator, cst.GreaterThan | cst.LessThanEqual):
        return f"{limit} + 1"
    exact = isinstance(right.operator, cst.GreaterThanEqual | cst.Equal | cst.LessThan)
    return limit if exact else ""


def _only_break(statement: cst.If) -> bool:
    lines = list(statement.body.body)
    parts = (
        lines[0].body if len(lines) == 1 and isinstance(lines[0], cst.SimpleStatementLine) else ()
    )
    return statement.orelse is None and len(parts) == 1 and isinstance(parts[0], cst.Break)
