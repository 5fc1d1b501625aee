"""Write states as plain JSON that names its tensors: all values except elements, and no pickle.

JSON keeps None, booleans, integers of 64 bits, finite floats, strings and lists. Any other value is
an object with one entry that names its kind, for example {"tuple": [...]}.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from rekindle.errors import CorruptError, SessionError
from rekindle.training.torch import private
from rekindle.training.torch.state import tensor_forms, values
from rekindle.training.torch.state.nodes import LiveParts, Node
from rekindle.training.torch.state.tensor_forms import is_flattened

# The codes of the safetensors format, and the inverse mapping.
DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}

_MAPPING_KINDS: Mapping[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
MAPPINGS: Mapping[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),  # MultiStepLR keeps its milestones in a Counter
}
_INT64 = range(-(2**63), 2**63)
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Errors of decoders for nodes that Rekindle has not written.
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError)
_DENSE = ("tensor", "shard")  # the kinds of nodes that are tensors of the file


class Writer:
    """Turns states into nodes and collects their tensors by name; names are paths.

    distributed: the DTensors of the tensors that are pieces of one, by name. own: the tensors as
    the states have them; those in `tensors` are views of them without gradients. live: the parts of
    the states that no file contains.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.own: dict[str, torch.Tensor] = {}
        self.live = LiveParts()
        self.distributed: dict[str, Any] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Node:
        """Return a value's node. Raises SessionError: a state cannot hold it; names its place."""
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and value in _INT64):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is int:
            return {"int": str(value)}
        if kind is list:
            return [self.encode(each, f"{path}.{i}") for i, each in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.encode(each, f"{path}.{i}") for i, each in enumerate(value)]}
        if kind in _MAPPING_KINDS:
            return {_MAPPING_KINDS[kind]: self.pairs(value, path)}
        if kind in _TENSOR_TYPES and value.dtype in DTYPE_CODES and _is_dense(value):
            return {"tensor": self._encode_tensor(value, path)}
        if kind.__name__ == "DTensor":  # by name: most scripts do not import it
            return {"shard": self._encode_shard(value, path)}
        if kind in _TENSOR_TYPES or is_flattened(kind):
            node, what = tensor_forms.encode(value, path, self), _what(value)
        else:
            node, what = values.encode(value, path, self), f"value of type {kind.__qualname__}"
        if node is None:
            raise SessionError(f"{path}: a state cannot contain a {what}; {values.REMEDY}")
        return node

    def pairs(self, value: Mapping[Any, Any], path: str) -> list[Node]:
        """Return the nodes of a mapping's keys and values, in their order."""
        return [
            [
                key if type(key) is str else self.encode(key, f"{path}[{key!r}]"),
                self.encode(each, f"{path}.{key}"),
            ]
            for key, each in value.items()
        ]

    def _encode_shard(self, value: Any, path: str) -> Node:
        local = value.detach().to_local()
        if type(local) not in _TENSOR_TYPES or local.dtype not in DTYPE_CODES or local.is_meta:
            raise SessionError(
                f"{path}: a state cannot contain a piece of {type(local).__qualname__}, "
                f"{local.dtype} of a distributed tensor; {values.REMEDY}"
            )
        body = self._encode_tensor(local, path, piece=True)
        self.distributed[body[0]] = value
        return body

    def _encode_tensor(self, tensor: torch.Tensor, path: str, *, piece: bool = False) -> Node:
        # One memory has one name: tied weights are kept once, and stay tied when they are loaded.
        # Pieces without elements have no memory, but those of tied weights share one storage.
        at = tensor.data_ptr() if tensor.numel() else private.storage_id(tensor)
        memory = (at, tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        name = self._names.get(memory) if tensor.numel() or piece else None
        if name is None:
            name = path
            while name in self.tensors:
                name += "'"  # {"a.b": ..., "a": {"b": ...}}
            self._names[memory] = name
            self.tensors[name], self.own[name] = tensor.detach(), tensor
        return [name, *_form(tensor)]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _what(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that no state can hold."""
    return "meta tensor" if tensor.is_meta else f"tensor of {tensor.layout}, {tensor.dtype}"


class Reader:
    """Turns nodes into states.

    tensors: existing tensors, by name. The reader adds new, unfilled tensors for the other names.
    live: the parts of states that no file contains. None: the program is not the training script;
    a value of a class of the script becomes a text, a tuple, a number or a mapping.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], live: LiveParts | None = None) -> None:
        self.tensors = tensors
        self.live = live

    def decode(self, node: Node) -> Any:
        """Return the value; tensors below a node for which is_late() holds must be filled.

        Raises CorruptError: Rekindle has not written such a node; SessionError: the process has not
        loaded the class of a value.
        """
        if isinstance(node, list):
            return [self.decode(each) for each in node]
        if not isinstance(node, dict):
            return node
        [(kind, body)] = node.items()
        match kind:
            case "tuple":
                return tuple(self.decode(each) for each in body)
            case "tensor":
                return self._decode_tensor(TensorSpec(*body))
            case "shard":
                return LocalShard(self._decode_tensor(TensorSpec(*body)))
            case "int" | "float":
                return int(body) if kind == "int" else float(body)
        if kind in MAPPINGS:
            return MAPPINGS[kind]([(self.decode(key), self.decode(each)) for key, each in body])
        forms = tensor_forms if kind in tensor_forms.DECODERS else values
        try:
            return forms.DECODERS[kind](body, self)
        except _DAMAGE as error:
            raise CorruptError(
                f"the state has a damaged value of kind {kind!r}: {error}"
            ) from error

    def _decode_tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = self.tensors.get(spec.name)
        if tensor is None:
            tensor = self.tensors[spec.name] = spec.make()
        return tensor


class LocalShard(NamedTuple):
    """This rank's piece of a distributed tensor; the live owner knows how it is distributed."""

    tensor: torch.Tensor


class TensorSpec(NamedTuple):
    """A tensor in the form of its node.

    stride: without the dimensions of size 1; None: rows are contiguous. Kernels that process the
    memory of several tensors together (fused optimizers) need states with the layout of their
    parameters.
    """

    name: str
    code: str
    shape: list[int]
    device: str
    stride: list[int] | None

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor agrees with this specification in all except its elements."""
        return _form(tensor) == self[1:]

    def make(self) -> torch.Tensor:
        """Return such a tensor without defined elements."""
        dtype = TORCH_DTYPES[self.code]
        if self.stride is None:
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        sizes = [size for size in self.shape if size != 1]
        dense = torch.empty_strided(sizes, self.stride, dtype=dtype, device=self.device)
        return dense.view(self.shape)


def _form(tensor: torch.Tensor) -> tuple[str, list[int], str, list[int] | None]:
    form = (DTYPE_CODES[tensor.dtype], list(tensor.shape), tensor.device.type)
    return (*form, stride_of(tensor))


def stride_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the stride for TensorSpec; None also for a tensor with gaps: no copy keeps gaps."""
    if tensor.is_contiguous():
        return None
    steps = [(a, b) for a, b in zip(tensor.stride(), tensor.shape, strict=True) if b != 1]
    filled = 1
    for stride, size in sorted(steps):
        if stride != filled:
            return None
        filled *= size
    return [stride for stride, _ in steps]


def tensor_specs(node: Node) -> Iterator[TensorSpec]:
    """Yield all tensors below the node, in the order in which they were collected."""
    if isinstance(node, dict):
        [(kind, body)] = node.items()
        if kind in _DENSE:
            yield TensorSpec(*body)
        else:
            yield from tensor_specs(body)
    elif isinstance(node, list):
        for each in node:
            yield from tensor_specs(each)


def is_late(node: Node) -> bool:
    """Return whether a value below the node can only be made from the elements of its tensors."""
    if isinstance(node, list):
        return any(map(is_late, node))
    if not isinstance(node, dict):
        return False
    [(kind, body)] = node.items()
    if kind in _DENSE:
        return False
    known = kind in MAPPINGS or kind == "tuple" or kind in tensor_forms.VIEWS
    return is_late(body) if known else next(tensor_specs(body), None) is not None


def difference(expected: Node, found: Node, path: str) -> str | None:
    """Describe the first difference of two nodes; None: equal. The order in mappings is free."""
    if msgspec.json.encode(expected) == msgspec.json.encode(found):
        return None
    if type(expected) is type(found):
        if isinstance(expected, list) and len(expected) == len(found):
            pairs = zip(expected, found, range(len(found)), strict=True)
            return _first(difference(a, b, f"{path}.{i}") for a, b, i in pairs)
        if isinstance(expected, dict) and expected.keys() == found.keys():
            [(kind, a)], [(_, b)] = expected.items(), found.items()
            if kind in MAPPINGS:
                return _difference_of_pairs(a, b, path)
            return difference(a, b, path)
    return f"{path}: {_short(found)} instead of {_short(expected)}"


def _difference_of_pairs(expected: list[Node], found: list[Node], path: str) -> str | None:
    a, b = ({msgspec.json.encode(key): value for key, value in each} for each in (expected, found))
    for key in [*a, *b]:
        if key not in a or key not in b:
            what = "missing" if key in a else "too much"
            return f"{path}.{key.decode()}: {what}"
    return _first(difference(a[key], b[key], f"{path}.{key.decode()}") for key in a)


def _first(differences: Iterator[str | None]) -> str | None:
    return next((each for each in differences if each is not None), None)


def _short(node: Node) -> str:
    text = msgspec.json.encode(node).decode()
    return text if len(text) <= 100 else text[:100] + "..."
