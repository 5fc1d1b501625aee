"""Write tensors that are not dense, or that the file format has no dtype for, as nodes.

Each consists of dense tensors: sparse, quantized and complex tensors, and those of a subclass that
has `__tensor_flatten__` (8-bit optimizers). A subclass is a class that the process has loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rekindle.training.torch import private
from rekindle.training.torch.state.nodes import Decoder, Node, Reader, Writer

_LAYOUTS = {
    str(each): each
    for each in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
# Nodes of other kinds with tensors below them need the elements of these.
VIEWS = ("complex_tensor", "viewed", "flattened")


def is_flattened(kind: type) -> bool:
    """Return whether tensors of this class name the tensors that they consist of."""
    return (
        issubclass(kind, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    )


def encode(tensor: torch.Tensor, path: str, writer: Writer) -> Node | None:
    """Return the node; None: a skeleton cannot hold such a tensor."""
    if tensor.is_meta:
        return None
    if is_flattened(type(tensor)):
        return _encode_flattened(tensor, path, writer)
    if tensor.layout is torch.sparse_coo:
        parts = private.coo_parts(tensor)
        names = ("indices", "values")
        body = [
            writer.encode(each, f"{path}.{name}") for each, name in zip(parts, names, strict=True)
        ]
        return {"coo": [list(tensor.shape), tensor.is_coalesced(), *body]}
    if str(tensor.layout) in _LAYOUTS:
        by_column = tensor.layout in _BY_COLUMN
        outer = tensor.ccol_indices() if by_column else tensor.crow_indices()
        inner = tensor.row_indices() if by_column else tensor.col_indices()
        named = {"outer": outer, "inner": inner, "values": tensor.values()}
        body = [writer.encode(each, f"{path}.{name}") for name, each in named.items()]
        return {"compressed": [str(tensor.layout), list(tensor.shape), *body]}
    if tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized:
        return _encode_quantized(tensor, path, writer)
    if tensor.is_complex():
        return {"complex_tensor": writer.encode(torch.view_as_real(tensor.resolve_conj()), path)}
    try:
        rows = tensor.view(torch.uint8)
    except RuntimeError:  # its elements have no bytes of their own, or it has gaps
        return None
    return {"viewed": [str(tensor.dtype).removeprefix("torch."), writer.encode(rows, path)]}


def _encode_quantized(tensor: torch.Tensor, path: str, writer: Writer) -> Node | None:
    scheme = str(tensor.qscheme()).removeprefix("torch.")
    dtype = str(tensor.dtype).removeprefix("torch.")
    whole = writer.encode(tensor.int_repr(), path)
    if scheme in ("per_tensor_affine", "per_tensor_symmetric"):
        scale = [writer.encode(tensor.q_scale(), path), tensor.q_zero_point()]
        return {"quantized": [dtype, whole, *scale]}
    scales = writer.encode(tensor.q_per_channel_scales(), f"{path}.scales")
    zeros = writer.encode(tensor.q_per_channel_zero_points(), f"{path}.zero_points")
    return {"quantized_channels": [dtype, whole, scales, zeros, tensor.q_per_channel_axis()]}


def _encode_flattened(value: Any, path: str, writer: Writer) -> Node | None:
    names, context = value.__tensor_flatten__()
    sizes = [writer.encode(each, path) for each in (context, value.size(), value.stride())]
    parts = [[name, writer.encode(getattr(value, name), f"{path}.{name}")] for name in names]
    return {"flattened": [writer.live.note(type(value)), parts, *sizes]}


def _decode_flattened(body: Any, reader: Reader) -> Any:
    name, parts, *sizes = body
    inner = {str(part): reader.decode(node) for part, node in parts}
    if reader.live is None:
        return inner
    kind = reader.live.find(name, is_flattened)
    return kind.__tensor_unflatten__(inner, *(reader.decode(each) for each in sizes))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype of torch")
    return found


def _decode_coo(body: Any, reader: Reader) -> torch.Tensor:
    shape, coalesced, *parts = body
    indices, values = map(reader.decode, parts)
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, check_invariants=True
    )


def _decode_compressed(body: Any, reader: Reader) -> torch.Tensor:
    layout, shape, *parts = body
    outer, inner, values = map(reader.decode, parts)
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=_LAYOUTS[layout], check_invariants=True
    )


def _decode_quantized(body: Any, reader: Reader) -> torch.Tensor:
    dtype, whole, *scheme = body
    plain = reader.decode(whole)
    if len(scheme) == 2:
        found = private.quantized(plain, reader.decode(scheme[0]), scheme[1])
    else:
        scales, zeros = reader.decode(scheme[0]), reader.decode(scheme[1])
        found = private.quantized_by_channel(plain, scales, zeros, scheme[2])
    if found.dtype != _dtype(dtype):
        raise ValueError(f"the elements are not of {dtype}")
    return found


DECODERS: Mapping[str, Decoder] = {
    "coo": _decode_coo,
    "compressed": _decode_compressed,
    "complex_tensor": lambda b, r: torch.view_as_complex(r.decode(b)),
    "viewed": lambda b, r: r.decode(b[1]).view(_dtype(b[0])),
    "quantized": _decode_quantized,
    "quantized_channels": _decode_quantized,
    "flattened": _decode_flattened,
    "dtype": lambda b, _: _dtype(b),
}
