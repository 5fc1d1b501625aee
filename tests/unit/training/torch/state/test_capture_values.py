"""Values in the states of objects: a transfer is exact, or `capture` refuses the value."""

from __future__ import annotations

import collections
import enum
import math
import random
import sys
import zoneinfo
from collections import Counter, OrderedDict
from datetime import date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import move

from rekindle.errors import CorruptError, SessionError
from rekindle.training.torch.state.capture import (
    DTYPE_CODES,
    TORCH_DTYPES,
    CapturedState,
    as_bytes,
    capture,
    finish,
    prepare,
)
from rekindle.training.torch.state.skeleton import tensor_specs


class Kept:
    """An object whose state is the value that it received."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def round_trip(value: Any) -> Any:
    target = {"kept": Kept(None)}
    move(capture({"kept": Kept(value)}), target)
    return target["kept"].value


def identical(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(as_bytes(a), as_bytes(b))
    if isinstance(a, (float, np.floating)):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b)


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"))
)
keys = st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")) | st.none()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(values)
def test_plain_values_round_trip_exactly(value: Any):
    """The transfer keeps values and their types, also the types and order of keys."""
    assert identical(round_trip(value), value)


def test_values_that_json_has_no_words_for_round_trip():
    """Counters, numpy's scalars, infinities and integers of any size keep value and type."""
    value = {
        "counter": Counter({3: 2, 1: 1}),
        "numpy": (
            np.float64(0.1),
            np.float32(0.1),
            np.int64(-3),
            np.bool_(True),
            np.float32("nan"),
        ),
        "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1],
        "integers": [2**63, -(2**63), 2**63 - 1, -(2**200)],
        "keys": {(1, "a"): 1, 1.5: 2, None: 3, True: 4, "True": 5},
    }
    assert identical(round_trip(value), value)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_tensors_of_every_dtype_round_trip(dtype: torch.dtype):
    """The transfer keeps bits, dtype and shape, for scalars, empty tensors and any stride."""
    size = torch.empty(0, dtype=dtype).element_size()
    row = torch.randint(0, 2, (24 * size,), dtype=torch.uint8) * (1 if dtype is torch.bool else 93)
    block = row.view(dtype).view(4, 6)
    value = {
        "block": block,
        "turned": block.t(),
        "channels_last": row.view(dtype).view(2, 3, 1, 4).permute(0, 3, 2, 1),
        "sparse": block[::2, 1::3],
        "scalar": block[1, 1].clone(),
        "empty": block[:0],
        "a.b": block[0].clone(),
        "a": {"b": block[1].clone()},
    }
    copied = round_trip(value)
    assert identical(copied, value)
    assert copied["turned"].stride() == (1, 6)
    assert copied["channels_last"].squeeze(2).stride() == value["channels_last"].squeeze(2).stride()
    assert TORCH_DTYPES[DTYPE_CODES[dtype]] is dtype


class Image(torch.Tensor):
    """A subclass of Tensor that does not say what it consists of."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"state": {3: {"hook": print}}},
            r"^kept\.state\.3\.hook: .*type builtin_function_or_method",
        ),
        ({"list": [1, object()]}, r"^kept\.list\.1: .*type object; keep it out of the state"),
        ({"array": np.array([object()])}, r"^kept\.array: .*type ndarray"),
        ({"fields": np.zeros(2, "i4,f4")}, r"^kept\.fields: .*type ndarray"),
        ({"set": {b"x"}}, r"^kept\.set: a set in a state cannot contain tensors or bytes"),
        ({"meta": torch.empty(2, device="meta")}, r"^kept\.meta: .*meta"),
        ({"image": torch.zeros(2).as_subclass(Image)}, r"^kept\.image: .*type Image"),
        ({"own": collections.UserDict()}, r"^kept\.own: .*type UserDict"),
        ({"text": "\ud800"}, "JSON"),
    ],
)
def test_what_a_state_cannot_hold_is_refused_by_its_place(value: Any, message: str):
    """A SessionError names the path of the first unsupported value."""
    with pytest.raises(SessionError, match=message):
        capture({"kept": Kept(value)})


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Mode(enum.IntFlag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: float
    y: torch.Tensor


class Halves(torch.Tensor):
    """A tensor in two parts, as 8-bit optimizers have them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Halves:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(own.codes, own.scale, own.signed)
        if func is torch.ops.aten._to_copy.default:
            return cls(own.codes.clone(), own.scale.clone(), own.signed)
        raise NotImplementedError(func)


def test_values_of_python_round_trip():
    """Sets, bytes, Enums, named tuples, queues, paths, dates, complex numbers stay equal."""
    value = {
        "set": {1, "a", (2, None), frozenset({3})},
        "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
        "enums": [Colour.RED, Colour.BLUE, Mode.READ | Mode.WRITE, Mode(0)],
        "point": Point(1.5, torch.arange(3)),
        "deque": collections.deque([1, [2]], maxlen=3),
        "free": collections.deque(),
        "lists": collections.defaultdict(list, {"a": [1]}),
        "none": collections.defaultdict(None, {1: 2}),
        "paths": [Path("/a/b"), PurePosixPath("c")],
        "times": [
            datetime(2026, 1, 2, 3, 4, 5, 6),
            datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2), "here"), fold=1),
            datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
            date(2026, 1, 2),
            time(1, 2, 3),
            timedelta(days=-1, microseconds=5),
        ],
        "complex": [1 + 2j, complex(math.nan, -0.0), np.complex64(1j), np.complex128(2 - 1j)],
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
        "keys": {Colour.RED: 1, frozenset({1}): 2, Path("x"): 3},
    }
    copied = round_trip(value)
    # The order of a set of texts differs between two sets.
    assert repr({**copied, "set": 0}) == repr({**value, "set": 0})
    assert {"set": copied["set"], "keys": copied["keys"]} == {
        key: value[key] for key in ("set", "keys")
    }
    assert [type(each) for each in copied["complex"]] == [type(each) for each in value["complex"]]
    assert copied["enums"][0] is Colour.RED
    assert copied["deque"].maxlen == 3
    assert copied["times"][1].fold == 1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(6)[::-2],
        np.array(["ab", "c"]),
        np.array(["2026-01-02", "NaT"], "datetime64[D]"),
        np.zeros((2, 0), np.float16),
        np.array(3, ">i2"),
        np.array([1 + 2j]),
        np.array([True, False]),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_round_trip(array: np.ndarray):
    """Arrays of NumPy keep dtype, shape, elements and the order of their memory."""
    array.flags.writeable = False
    copied = round_trip({"array": array, "scalar": array.reshape(-1)[:1].copy()})["array"]
    assert (copied.dtype, copied.shape) == (array.dtype, array.shape)
    assert copied.tobytes() == array.tobytes()
    if array.flags.forc:
        assert copied.flags.f_contiguous == array.flags.f_contiguous
    copied[...] = copied  # it can be written


def test_generators_round_trip():
    """Each kind of generator continues with the same numbers."""
    generators = {
        "torch": torch.Generator().manual_seed(3),
        "numpy": [np.random.default_rng(3), np.random.Generator(np.random.Philox(3))],
        "legacy": np.random.RandomState(3),
        "global": np.random.get_state(),
        "python": random.Random(3),
    }
    copied = round_trip(generators)
    drawn = []
    for each in (copied, generators):
        legacy = np.random.RandomState()
        legacy.set_state(each["global"])
        drawn.append(
            [
                torch.rand(3, generator=each["torch"]).tolist(),
                *(one.random(3).tolist() for one in each["numpy"]),
                each["legacy"].normal(size=3).tolist(),
                legacy.normal(size=3).tolist(),
                each["python"].gauss(0, 1),
            ]
        )
    assert drawn[0] == drawn[1]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_tensors_of_special_forms_round_trip():
    """Sparse, quantized and complex tensors, and those of subclasses, stay equal."""
    eye = torch.eye(4)
    value = {
        "wide": torch.randn(3, dtype=torch.complex128),
        "turned": torch.randn(2, 3, dtype=torch.complex128).t().conj(),
        "half": torch.zeros(2, dtype=torch.complex32),
        "fours": torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "scales": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "coo": eye.to_sparse(),
        "loose": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
        "csr": eye.to_sparse_csr(),
        "csc": eye.to_sparse_csc(),
        "bsr": eye.to_sparse_bsr((2, 2)),
        "per_tensor": torch.quantize_per_tensor(torch.randn(3), 0.1, 2, torch.quint8),
        "per_channel": torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
        ),
    }
    copied = round_trip(value)
    for name, each in value.items():
        found = copied[name]
        assert (found.dtype, found.layout, found.shape) == (each.dtype, each.layout, each.shape)
        if each.is_quantized:
            assert found.qscheme() == each.qscheme()
            assert torch.equal(found.dequantize(), each.dequantize())
        elif each.layout is not torch.strided:
            assert torch.equal(found.to_dense(), each.to_dense())
        else:
            assert torch.equal(as_bytes(found.resolve_conj()), as_bytes(each.resolve_conj()))
    assert not copied["loose"].is_coalesced()
    part = Halves(torch.arange(3, dtype=torch.uint8), torch.ones(1), signed=True)
    found = round_trip({"part": part})["part"]
    assert type(found) is Halves
    assert found.signed
    assert torch.equal(found.codes, part.codes)


def test_optimizer_state_of_a_subclass_is_filled_in_place():
    """An optimizer without a state gets a tensor of a subclass with its values."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizers = [torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for _ in range(2)]
    part = Halves(torch.arange(3, dtype=torch.uint8), torch.ones(1), signed=False)
    optimizers[0].state[parameter]["momentum_buffer"] = part
    move(capture({"optimizer": optimizers[0]}), {"optimizer": optimizers[1]})
    found = optimizers[1].state[parameter]["momentum_buffer"]
    assert type(found) is Halves
    assert torch.equal(found.codes, part.codes)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
def test_special_tensors_of_a_module_are_restored():
    """Complex parameters, sparse and quantized buffers get the values of the state."""

    def build(scale: float) -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        module.weight = torch.nn.Parameter(scale * torch.ones(2, 2, dtype=torch.complex128))
        module.register_buffer("adjacent", (scale * torch.eye(2)).to_sparse())
        packed = torch.quantize_per_tensor(torch.ones(2), scale, 0, torch.qint8)
        module.register_buffer("packed", packed)
        return module

    source, target = build(0.5), build(0.25)
    weight = target.weight
    move(capture({"model": source}), {"model": target})
    assert target.weight is weight
    assert torch.equal(weight, source.weight)
    assert torch.equal(target.adjacent.to_dense(), source.adjacent.to_dense())
    assert torch.equal(target.packed.dequantize(), source.packed.dequantize())


def test_a_function_of_a_defaultdict_comes_from_the_live_object():
    """The function of a defaultdict is the one of the script; without it the load is refused."""
    made = Kept({"a": collections.defaultdict(lambda: 7, {"x": 1})})
    live = Kept({"a": collections.defaultdict(lambda: 8)})
    move(capture({"kept": made}), {"kept": live})
    assert live.value == {"a": {"x": 1}}
    assert live.value["a"]["new"] == 8
    with pytest.raises(SessionError, match=r"a defaultdict at kept\.a with a function"):
        move(capture({"kept": made}), {"kept": Kept({})})


@pytest.mark.parametrize(
    "node",
    [
        {"enum": ["os:system", "name"]},
        {"enum": ["antigravity:Anything", "name"]},
        {"namedtuple": ["subprocess:Popen", ["args"], ["true"]]},
        {"namedtuple": ["builtins:tuple", [], []]},
        {"flattened": ["torch:Tensor", [], [], {"size": []}, {"tuple": []}]},
        {"flag": ["builtins:int", 3]},
        {"object": 1},
        {"dtype": "manual_seed"},
        {"ndarray": ["|O", [1], "C", {"tensor": ["kept", "U8", [8], "cpu", None]}]},
        {"path": ["Popen", "x"]},
        {"defaultdict": [{"builtin": "eval"}, []]},
        {"RandomState": ["seed", None]},
        {"zone": "../../etc/passwd"},
        {"coo": [[2], True, 1, 2]},
    ],
)
def test_a_hostile_node_makes_no_object(node: Any):
    """A state cannot name a function, an object or a module that the process has not loaded."""
    before = set(sys.modules)
    target = {"kept": Kept(None)}
    tensors = {spec.name: spec.make() for spec in tensor_specs(node)}
    state = CapturedState(msgspec.json.encode({"kept": node}), tensors, {})
    with pytest.raises((SessionError, CorruptError)):
        move(state, target)
    assert target["kept"].value is None
    assert "antigravity" not in set(sys.modules) - before


def test_an_object_that_does_not_take_its_state_over_is_found_out():
    """finish() raises SessionError if an object's state differs from the state that it received."""

    class Forgetful(Kept):
        def load_state_dict(self, state: Any) -> None:
            self.value = {"step": 0}

    named = {"kept": Forgetful(None)}
    prepare(named, capture({"kept": Kept({"step": 3})}).skeleton)
    with pytest.raises(SessionError, match=r'kept\."step": 0 instead of 3'):
        finish(named)
