"""The training state of a MindSpore network: its parameters, read without a copy where possible.

Training changes only the parameters of a model's train network: weights, values that the optimizer
keeps, and its step. A state has the layout of a safetensors file, in memory, on the wire and in the
store. The skeleton states only that all tensors are parameters.
"""

from __future__ import annotations

import functools
import platform
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mindspore
import msgspec
import numpy as np
import xxhash
from mindspore import nn, ops

from rekindle.checkpoints.format import METADATA_ORIGIN, read_header
from rekindle.checkpoints.manifest import ShardLayout, StateOrigin
from rekindle.errors import CorruptError, SessionError
from rekindle.rank.progress import RankPlace
from rekindle.rank.snapshot_writer import Captured, SnapshotWriter

BEGUN = "rekindle_begun"  # the parameter that counts the updates that began; a part of the state
SMALL_BYTES = 64 << 10  # bytes of a parameter that is always copied before each step
LOOKS = 3  # steps until it is known which other parameters a forward pass changes
LOOKS_AGAIN = 1000  # steps; a change between two looks leaves no state until the next look
SKELETON = b'{"mindspore":"parameters"}'

Array = np.ndarray[Any, np.dtype[Any]]
Form = tuple[str, str, tuple[int, ...]]  # name, code of safetensors, shape

CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


@functools.cache
def recoverable(optimizer: type[nn.Optimizer]) -> type[nn.Optimizer]:
    """Return the optimizer's class with complete updates: recoverable(nn.Momentum)(...).

    A graph runs each operation that can run. If another rank fails in a step, some parameters may
    be updated, while gradients of others never arrive. Then the state belongs to no step. Here each
    update waits for all gradients, and counts itself before it begins. So a rank that is
    interrupted in a step has the state of the step before. The counter proves that no update began
    since then.

    The computed numbers are the same as the optimizer's own, bit for bit. Raises TypeError: the
    argument is not a class of an optimizer.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, nn.Optimizer)):
        raise TypeError(
            f"recoverable() takes the class of an optimizer, such as nn.Momentum, not {optimizer!r}"
        )

    class Recoverable(optimizer):  # type: ignore[misc]  # a class of the caller's choice
        """The optimizer, with undivided updates."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            zero = mindspore.Tensor([0], mindspore.int32)
            self.rekindle_begun = mindspore.Parameter(zero, name=BEGUN, requires_grad=False)
            self.rekindle_one = mindspore.Tensor([1], mindspore.int32)
            self.rekindle_after = ops.Depend()
            # On the instance, which gets the optimizer's own class again. MindSpore compiles only
            # one level of calls to super().construct(), and the optimizer may use that level
            # itself.
            object.__setattr__(self, "rekindle_update", self.construct)
            object.__setattr__(self, "construct", types.MethodType(_counted, self))
            if type(self) is Recoverable:
                object.__setattr__(self, "__class__", optimizer)

    def _counted(self: Recoverable, gradients: Any) -> Any:
        one = self.rekindle_after(self.rekindle_one, gradients)
        begun = self.rekindle_begun + one
        self.rekindle_begun = begun
        return self.rekindle_update(self.rekindle_after(gradients, begun))

    Recoverable.__name__ = Recoverable.__qualname__ = optimizer.__name__
    return Recoverable


class Parameters:
    """The parameters of a network, in the order of their names."""

    def __init__(self, network: mindspore.nn.Cell) -> None:
        """Read the parameters. Raises SessionError: two have one name, or one cannot be kept."""
        network.init_parameters_data()
        found: dict[str, mindspore.Parameter] = {}
        for parameter in network.get_parameters():
            if found.setdefault(parameter.name, parameter) is not parameter:
                raise SessionError(
                    f"two parameters have the name {parameter.name}; give each parameter its own "
                    "name"
                )
        self._parameters = dict(sorted(found.items()))
        forms_of(self.arrays())
        cells = [each for _, each in network.cells_and_names() if isinstance(each, nn.Optimizer)]
        counters = [name for name in found if name.rpartition(".")[2] == BEGUN]
        # An optimizer that does not count its updates may update at any time.
        self._counters = counters if len(counters) == len(cells) else []
        updated = {
            each.name for cell in cells for each in (*cell.get_parameters(), *cell.parameters)
        }
        # No optimizer updates these, but the forward pass may change some before an update begins:
        # BatchNorm's statistics, and sums of gradients. Only small ones and ones that change are
        # copied, because copies of frozen weights would cost too much.
        self._others = [name for name in found if name not in updated] if self._counters else []
        self._changing = {name for name in self._others if found[name].nbytes <= SMALL_BYTES}
        self._remembered: dict[str, Array] = {}
        self._digests: dict[str, int] = {}  # the digests of the others, at the newest look
        self._looks = 0

    def remember(self) -> None:
        """Keep the parameters that the forward pass of the next step may change."""
        self._looks += 1
        if self._looks <= LOOKS or self._looks % LOOKS_AGAIN == 0:
            found = {n: self._digest(n) for n in self._others if n not in self._changing}
            before = self._digests
            self._changing |= {n for n in found if before.get(n, found[n]) != found[n]}
            self._digests = {n: each for n, each in found.items() if n not in self._changing}
        for name in self._changing:
            self._remembered[name] = self._parameters[name].asnumpy().copy()

    @property
    def are_as_before(self) -> bool:
        """Whether `before_step` includes all parameters that the current step has changed."""
        return all(self._digest(name) == was for name, was in self._digests.items())

    def _digest(self, name: str) -> int:
        return xxhash.xxh3_64_intdigest(bytes_of(self._parameters[name].asnumpy()).data)

    @property
    def before_step(self) -> BeforeStep:
        """The values from the start of the current step, valid until the step's update begins."""
        return BeforeStep(self, self._remembered)

    def restore(self) -> None:
        """Set the values from the start of the current step, whose update has not begun."""
        for name, array in self._remembered.items():
            self._parameters[name].copy_(mindspore.Tensor(array))

    @property
    def begun(self) -> tuple[int, ...] | None:
        """The numbers of updates that began, as `recoverable` counts them; None: they are unknown.

        In PyNative mode a read would wait for all operations that were launched before it.
        """
        in_graph = mindspore.get_context("mode") == mindspore.GRAPH_MODE
        if not self._counters or not in_graph:
            return None
        return tuple(_number_in(self._parameters[name]) for name in self._counters)

    def digest(self) -> int:
        """Return a 64-bit checksum of all values."""
        checksum = xxhash.xxh3_64()
        for array in self.arrays().values():
            checksum.update(bytes_of(array).data)
        return int(checksum.intdigest())

    def spoil(self) -> None:
        """Overwrite all values, as damaged memory does."""
        for parameter in self._parameters.values():
            spoilt = np.full_like(parameter.asnumpy(), 0x55, subok=False)
            parameter.copy_(mindspore.Tensor(spoilt))

    def arrays(self) -> dict[str, Array]:
        """Return the values: on CPU the parameters' own memory, which the next step changes."""
        return {name: each.asnumpy() for name, each in self._parameters.items()}

    def fill(self, arrays: Mapping[str, Array]) -> None:
        """Set all values. Raises SessionError: they are the state of another model."""
        for name, parameter in self._parameters.items():
            theirs = arrays.get(name)
            if theirs is None:
                raise SessionError(
                    f"the state belongs to another model: it has no parameter {name}"
                )
            mine = parameter.asnumpy()
            if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise SessionError(
                    f"the state belongs to another model: parameter {name} is "
                    f"{theirs.dtype}{list(theirs.shape)} in the state, but "
                    f"{mine.dtype}{list(mine.shape)} in this model"
                )
        unknown = sorted(arrays.keys() - self._parameters.keys())
        if unknown:
            raise SessionError(
                f"the state belongs to another model: it has a parameter {unknown[0]}, and this "
                "model does not"
            )
        for name, parameter in self._parameters.items():
            # Not set_data() or assign_value(): with these, an optimizer with control flow kept
            # another step than it showed (observed with 2.10).
            parameter.copy_(mindspore.Tensor(arrays[name]))


def _number_in(parameter: mindspore.Parameter) -> int:
    """Return the number in a parameter, also while a graph runs.

    On an NPU asnumpy() would wait for the graph. MindSpore reads its own flag of updates like this.
    """
    if mindspore.get_context("device_target") == "Ascend":
        return int(mindspore._c_expression.direct_copy_to_host(parameter))
    return int(parameter.asnumpy()[0])


class BeforeStep(NamedTuple):
    """The parameters before a step; some have changed since, and their old values are kept."""

    parameters: Parameters
    remembered: Mapping[str, Array]

    def arrays(self) -> dict[str, Array]:
        """Return the values before the step."""
        return {**self.parameters.arrays(), **self.remembered}


def forms_of(arrays: Mapping[str, Array]) -> tuple[Form, ...]:
    """Return the entry of each array in a safetensors header.

    Raises SessionError: safetensors has no code for a dtype.
    """
    forms = []
    for name, array in arrays.items():
        code = CODES.get(array.dtype.name)
        if code is None:
            raise SessionError(
                f"parameter {name} has type {array.dtype}, which a state cannot contain"
            )
        forms.append((name, code, tuple(array.shape)))
    return tuple(forms)


def bytes_of(array: Array) -> Array:
    """Return the elements as one row of bytes: a view of a contiguous array, otherwise a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def read_state(file: memoryview, like: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays in a state's file, without a copy.

    like: this model's arrays. They give the dtypes for which safetensors has a code and numpy has
    none.
    Raises CorruptError: the file is invalid; SessionError: it belongs to another model.
    """
    header = read_header(file)
    found = {}
    for spec in header.specs:
        mine = like.get(spec.name)
        if mine is None or CODES.get(mine.dtype.name) != spec.dtype:
            raise SessionError(
                f"the state belongs to another model: it has {spec.name} ({spec.dtype}), and "
                "this model does not"
            )
        data = file[header.data_begin + spec.begin : header.data_begin + spec.end]
        try:
            found[spec.name] = np.frombuffer(data, dtype=mine.dtype).reshape(spec.shape)
        except ValueError as error:
            raise CorruptError(f"{spec.name}: {error}") from error
    return found


class _Row(NamedTuple):
    """The destination of a parameter's bytes."""

    name: str
    bytes: Array


class ParametersWriter(SnapshotWriter):
    """Copies parameters to the agent's buffers."""

    def capture(self, named: Mapping[str, Any], place: RankPlace, *, before: object) -> Captured:
        """Read the parameters (`named["parameters"]`)."""
        arrays = named["parameters"].arrays()
        forms = forms_of(arrays)
        form_metadata = _form_metadata(place) if forms != before else None
        return Captured(SKELETON, arrays, forms, form_metadata)

    def views(self, data: memoryview, state: Captured, begins: Mapping[str, int]) -> Sequence[_Row]:
        """Return rows of bytes in the buffer."""
        return [
            _Row(name, np.frombuffer(data, np.uint8, each.nbytes, begins[name]))
            for name, each in state.tensors.items()
        ]

    def copy(self, views: Sequence[_Row], state: Captured) -> None:
        """Copy the bytes of each parameter."""
        for row in views:
            row.bytes[:] = bytes_of(state.tensors[row.name])


def _form_metadata(place: RankPlace) -> Mapping[str, str]:
    versions = {"mindspore": mindspore.__version__, "python": platform.python_version()}
    origin = StateOrigin(versions=versions, layout=ShardLayout(shards=place.shards))
    return {METADATA_ORIGIN: msgspec.json.encode(origin).decode()}
