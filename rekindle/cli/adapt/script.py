"""Read a training script for `rekindle adapt`: its names, its updates and its training loop.

The script is parsed, never imported or run. A name of the script (`name`) is a variable or an
attribute of `self`, such as `model` or `self.model`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

Scope: TypeAlias = cst.FunctionDef | None  # None: the module
Loop: TypeAlias = cst.For | cst.While
Block: TypeAlias = cst.IndentedBlock | cst.Module

# All names under which torch has its wrapper.
WRAPPERS = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
}
INIT = {
    "torch.distributed.init_process_group",
    "torch.distributed.distributed_c10d.init_process_group",
}
SESSION = "rekindle.training.torch.Session"

_NOT_CODE = (
    cst.BaseParenthesizableWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Newline,
    cst.Comment,
)
_OPTIMIZER = re.compile(r"opt(?!ion)", re.IGNORECASE)
_FRAMEWORK = re.compile(r"accelerator|fabric|engine|booster|strategy", re.IGNORECASE)
_DEEPEST_CALL = 5  # calls between the training loop and the backward pass, or the epoch loop


@dataclass(frozen=True)
class Binding:
    """An assignment to a name. value: for a part of a tuple, what gives the tuple."""

    value: cst.BaseExpression
    node: cst.CSTNode


@dataclass(frozen=True)
class Update:
    """A call that changes the weights. fused: a helper does the backward pass and the update."""

    call: cst.Call
    optimizer: str
    scaler: str | None
    fused: bool


class Script:
    """A parsed script.

    text: its bytes. Raises ParserSyntaxError of LibCST: it is not Python.
    """

    def __init__(self, text: bytes) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._children: dict[cst.CSTNode, list[cst.CSTNode]] = defaultdict(list)
        for child, parent in self._parents.items():
            if not isinstance(child, _NOT_CODE):
                self._children[parent].append(child)
        self.nodes = list(self.walk(self.module))
        self.calls = [each for each in self.nodes if isinstance(each, cst.Call)]
        self.functions = [each for each in self.nodes if isinstance(each, cst.FunctionDef)]
        attributes = {each.attr for each in self.nodes if isinstance(each, cst.Attribute)}
        names = [each for each in self.nodes if isinstance(each, cst.Name)]
        self.words = {each.value for each in names if each not in attributes}
        self.imports = dict(self._imports())
        self._bindings: dict[tuple[cst.CSTNode, bool], dict[str, list[Binding]]] = {}
        self._updates: dict[cst.CSTNode, list[Update]] = {}
        self._calls_of = {each: list(self._callers(each)) for each in self.functions}
        self._called = {
            call: function for function, calls in self._calls_of.items() for call in calls
        }

    # Places.

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of a node's first line, from 1."""
        return self._positions[node].start.line

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that holds this one."""
        return self._parents.get(node)

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that hold this one, the nearest first."""
        while (found := self.parent(node)) is not None:
            yield found
            node = found

    def walk(self, node: cst.CSTNode, *, nested: bool = True) -> Iterator[cst.CSTNode]:
        """Yield a node and all below it, in order.

        nested: whether to enter functions and classes that are defined below it.
        """
        yield node
        for child in self._children[node]:
            if nested or not isinstance(child, cst.FunctionDef | cst.ClassDef):
                yield from self.walk(child, nested=nested)

    def calls_in(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls below a node, without those of functions defined there."""
        return [each for each in self.walk(node, nested=False) if isinstance(each, cst.Call)]

    def reached(self, node: cst.CSTNode) -> Iterator[cst.Call]:
        """Yield the calls below a node, and those of the functions of this file that it calls."""
        seen: set[cst.CSTNode] = set()
        unread = [node]
        while unread:
            for call in self.calls_in(unread.pop()):
                yield call
                function = self._called.get(call)
                if function is not None and function not in seen:
                    seen.add(function)
                    unread.append(function)

    def path(self, node: cst.CSTNode, call: cst.Call) -> list[cst.Call]:
        """Return the calls that lead from below a node to a call in a function of this file."""
        return self._path(node, call, _DEEPEST_CALL) or []

    def _path(self, node: cst.CSTNode, wanted: cst.Call, left: int) -> list[cst.Call] | None:
        calls = self.calls_in(node)
        if wanted in calls:
            return []
        for call in calls if left else ():
            function = self._called.get(call)
            if function is not None:
                rest = self._path(function.body, wanted, left - 1)
                if rest is not None:
                    return [call, *rest]
        return None

    def scope(self, node: cst.CSTNode) -> Scope:
        """Return the function that holds a node."""
        return next((each for each in self.above(node) if isinstance(each, cst.FunctionDef)), None)

    def owner(self, scope: Scope) -> cst.ClassDef | None:
        """Return the class of a method."""
        for each in self.above(scope) if scope is not None else ():
            if isinstance(each, cst.ClassDef):
                return each
            if isinstance(each, cst.FunctionDef):
                return None
        return None

    def loops(self, node: cst.CSTNode) -> list[Loop]:
        """Return the loops that hold a node in its own function, the nearest first."""
        found: list[Loop] = []
        for each in self.above(node):
            if isinstance(each, cst.FunctionDef):
                break
            if isinstance(each, cst.For | cst.While):
                found.append(each)
        return found

    def block(self, statement: cst.CSTNode) -> Block:
        """Return the block that holds a statement."""
        return next(
            each
            for each in self.above(statement)
            if isinstance(each, cst.IndentedBlock | cst.Module)
        )

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of a node."""
        return self.module.code_for_node(node).strip()

    # Names.

    def name(self, node: cst.CSTNode) -> str:
        """Return the dotted name that a node is, or an empty text."""
        if isinstance(node, cst.Name):
            return node.value
        if isinstance(node, cst.Attribute) and (before := self.name(node.value)):
            return f"{before}.{node.attr.value}"
        return ""

    def full(self, node: cst.CSTNode) -> str:
        """Return the dotted name of a node with the module from which the script imports it."""
        first, dot, rest = self.name(node).partition(".")
        return f"{self.imports.get(first, first)}{dot}{rest}"

    def variable(self, node: cst.CSTNode) -> str:
        """Return the name of a variable or of an attribute of self, or an empty text."""
        name = self.name(node)
        return name if re.fullmatch(r"(self\.)?\w+", name) else ""

    def method(self, call: cst.Call) -> tuple[str, str]:
        """Return a variable and its method that a call calls; else two empty texts."""
        func = call.func
        return (
            (self.variable(func.value), func.attr.value)
            if isinstance(func, cst.Attribute)
            else ("", "")
        )

    def bindings(self, name: str, scope: Scope) -> Sequence[Binding]:
        """Return the assignments of a name that this function, its class or the module has."""
        if name.startswith("self."):
            owner = self.owner(scope)
            return self._bindings_in(owner, name, nested=True) if owner else ()
        if scope is None or name in self.parameters(scope):
            return self._bindings_in(self.module if scope is None else scope, name)
        return self._bindings_in(scope, name) or self._bindings_in(self.module, name)

    def exists(self, name: str, scope: Scope) -> bool:
        """Return whether a name is a variable in this function."""
        known = scope is not None and name in self.parameters(scope)
        return known or bool(self.bindings(name, scope))

    def _bindings_in(
        self, node: cst.CSTNode, name: str, *, nested: bool = False
    ) -> Sequence[Binding]:
        if (node, nested) not in self._bindings:
            found = self._bindings[node, nested] = defaultdict(list)
            for each in self.walk(node, nested=nested):
                for target, whole in _assignments(each):
                    for part, value in _parts(target, whole):
                        found[self.name(part)].append(Binding(value, each))
        return self._bindings[node, nested].get(name, ())

    def targets(
        self, nodes: Iterable[cst.CSTNode]
    ) -> Iterator[tuple[str, cst.CSTNode, cst.CSTNode]]:
        """Yield the variables that statements set: name, node, and statement."""
        for each in nodes:
            for target, value in _assignments(each):
                for part, _ in _parts(target, value):
                    if isinstance(part, cst.Name):
                        yield part.value, part, each

    def parameters(self, function: cst.FunctionDef) -> list[str]:
        """Return the names of a function's parameters in the order of a call."""
        all_ = function.params
        return [
            each.name.value for each in (*all_.posonly_params, *all_.params, *all_.kwonly_params)
        ]

    def outward(self, name: str, calls: Sequence[cst.Call]) -> str:
        """Translate a name of an inner function for the function with the first of these calls.

        calls: the calls that lead to the inner function, the outermost first.
        Returns an empty text if the outer function has no name for it.
        """
        for call in reversed(calls):
            function = self._called[call]
            if name.startswith("self."):
                continue
            if name not in self.parameters(function):
                if self._bindings_in(function, name):
                    return ""
                continue
            name = self.variable(self._argument(call, function, name) or call)
            if not name:
                return ""
        return name

    def _argument(
        self, call: cst.Call, function: cst.FunctionDef, name: str
    ) -> cst.BaseExpression | None:
        names = self.parameters(function)
        if names and names[0] == "self":
            names = names[1:]
        for place, each in enumerate(call.args):
            if each.keyword is not None and each.keyword.value == name:
                return each.value
            if each.keyword is None and names[place : place + 1] == [name]:
                return each.value
        return None

    def callee(self, call: cst.Call) -> Scope:
        """Return the function of this file that a call calls."""
        return self._called.get(call)

    def calls_of(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return the calls of a function of this file."""
        return self._calls_of[function]

    def _callers(self, function: cst.FunctionDef) -> Iterator[cst.Call]:
        owner = self.owner(function)
        if owner is None:
            name = function.name.value
            for call in self.calls:
                steps = self.name(call.func).endswith(".step")  # optimizer.step(closure)
                if self.name(call.func) == name or (
                    steps and any(self.name(each.value) == name for each in call.args)
                ):
                    yield call
            return
        wanted = f"self.{function.name.value}"
        for each in self.walk(owner):
            if isinstance(each, cst.Call) and self.name(each.func) == wanted:
                yield each

    def _imports(self) -> Iterator[tuple[str, str]]:
        for each in self.nodes:
            if isinstance(each, cst.Import):
                for alias in each.names:
                    name = self.name(alias.name)
                    first = name.partition(".")[0]
                    yield (self.name(alias.asname.name), name) if alias.asname else (first, first)
            elif isinstance(each, cst.ImportFrom) and not isinstance(each.names, cst.ImportStar):
                module = "." * len(each.relative) + (self.name(each.module) if each.module else "")
                for alias in each.names:
                    new = alias.asname.name if alias.asname is not None else alias.name
                    yield self.name(new), f"{module}.{self.name(alias.name)}"

    # Training.

    def is_optimizer(self, name: str) -> bool:
        """Return whether a name is that of an optimizer."""
        return bool(_OPTIMIZER.search(name.rpartition(".")[2]))

    def update(self, call: cst.Call) -> Update | None:
        """Return the update of the weights that a call does."""
        first = self.variable(call.args[0].value) if call.args else ""
        receiver, method = self.method(call)
        if method == "step":
            if first and self.is_optimizer(first):
                return Update(call, first, receiver, fused=False)
            usual = Update(call, receiver, None, fused=False)
            return usual if receiver and self.is_optimizer(receiver) else None
        # A helper such as timm's NativeScaler: loss_scaler(loss, optimizer, ...).
        scaler = self.variable(call.func)
        if scaler and "loss" in first and len(call.args) > 1:
            optimizer = self.variable(call.args[1].value)
            if optimizer and self.is_optimizer(optimizer):
                return Update(call, optimizer, scaler, fused=True)
        return None

    def is_backward(self, call: cst.Call) -> bool:
        """Return whether a call is a backward pass of the script's own."""
        plain = isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"
        update = self.update(call)
        return (plain and not self.is_framework(call)) or (update is not None and update.fused)

    def is_framework(self, call: cst.Call) -> bool:
        """Return whether a call is the backward pass of a framework, which owns the loop."""
        if not isinstance(call.func, cst.Attribute):
            return False
        kind = call.func.attr.value
        receiver = self.code(call.func.value)
        return kind == "manual_backward" or (
            kind == "backward" and bool(call.args) and bool(_FRAMEWORK.search(receiver))
        )

    def updates(self, node: cst.CSTNode) -> list[Update]:
        """Return the updates that a statement does, also in functions of this file."""
        if node not in self._updates:
            found = (self.update(call) for call in self.reached(node))
            self._updates[node] = [each for each in found if each is not None]
        return self._updates[node]

    def training_loops(self) -> list[Loop]:
        """Return the loops with one update of the weights in each round."""
        found: dict[Loop, None] = {}
        for call in self.calls:
            if self.is_backward(call):
                loop = self._training_loop(call, _DEEPEST_CALL)
                if loop is not None:
                    found[loop] = None
        return list(found)

    def _training_loop(self, node: cst.CSTNode, calls_left: int) -> Loop | None:
        for loop in self.loops(node):
            if self.updates(loop.body) or _takes_batches(self, loop):
                return loop
        scope = self.scope(node)
        if scope is None or calls_left == 0:
            return None
        found = (self._training_loop(call, calls_left - 1) for call in self.calls_of(scope))
        return next((each for each in found if each is not None), None)

    def epoch_loops(
        self, node: cst.CSTNode, calls: Sequence[cst.Call] = ()
    ) -> Iterator[tuple[Loop, Sequence[cst.Call]]]:
        """Yield the loops around a training loop, with the calls that lead from one to the other.

        calls: those that lead to the node, the outermost first; none: one function has both loops.
        """
        around = self.loops(node)
        scope = self.scope(node)
        if around:
            yield around[0], calls
        elif scope is not None and len(calls) < _DEEPEST_CALL:
            for call in self.calls_of(scope):
                yield from self.epoch_loops(call, (call, *calls))


def range_of(script: Script, node: cst.CSTNode) -> Sequence[cst.Arg] | None:
    """Return the arguments of a range, also one inside of a progress bar."""
    if not isinstance(node, cst.Call) or not node.args:
        return None
    if script.name(node.func).rpartition(".")[2] in ("range", "trange"):
        return [each for each in node.args if each.keyword is None]
    return range_of(script, node.args[0].value)


def _takes_batches(script: Script, loop: Loop) -> bool:
    """Return whether a loop without a known update goes over a loader."""
    if isinstance(loop, cst.While) or range_of(script, loop.iter) is not None:
        return False
    return bool(re.search(r"load|batch", script.code(loop.iter)))


def _assignments(node: cst.CSTNode) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Return the targets of a statement, each with the value of the statement."""
    if isinstance(node, cst.Assign):
        return [(each.target, node.value) for each in node.targets]
    if isinstance(node, cst.AnnAssign | cst.AugAssign) and node.value is not None:
        return [(node.target, node.value)]
    return []


def _parts(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Return each part of an assignment's target with its value; a call is the value of all."""
    if not isinstance(target, cst.Tuple | cst.List):
        return [(target, value)]
    values: list[cst.BaseExpression] = [value] * len(target.elements)
    if isinstance(value, cst.Tuple | cst.List) and len(value.elements) == len(target.elements):
        values = [each.value for each in value.elements]
    return [
        pair
        for part, of_part in zip(target.elements, values, strict=True)
        for pair in _parts(part.value, of_part)
    ]
