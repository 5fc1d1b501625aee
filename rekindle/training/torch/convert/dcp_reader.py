"""Read a folder of torch.distributed.checkpoint without executing anything in it.

torch's own reader unpickles the metadata, and all values that are not tensors. So a file from an
unknown source could execute any code. Here the metadata become plain records of a few known kinds,
and values go through torch.load(weights_only=True). Shards are combined into complete tensors.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rekindle.checkpoints.files import explained, read_range
from rekindle.checkpoints.resharding import box_at, overlap
from rekindle.errors import CheckpointError, CorruptError

METADATA_FILE = ".metadata"

_PACKAGE = "torch.distributed.checkpoint."
_RECORDS = {
    *((_PACKAGE + "metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_PACKAGE + "metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_PACKAGE + "metadata", f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    (_PACKAGE + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath")),
    ("pathlib._local", "PosixPath"),  # the name in Python 3.13
}
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets of a part in the tensor, and its shape

_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, KeyError, IndexError, TypeError, ValueError, OverflowError),
    *(AttributeError, UnicodeError, RecursionError, MemoryError, RuntimeError),
)


def read_dcp(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Return the values in this folder by their flat names, and their paths in the nested state.

    Raises CorruptError: DCP did not write the folder, or only a pickle could restore a value;
    CheckpointError: a file cannot be read.
    """
    metadata_file = folder / METADATA_FILE
    with explained("read", metadata_file):
        data = metadata_file.read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        stored = _stored(metadata.storage_data)
        kinds = dict(metadata.state_dict_metadata)
        paths = _paths(metadata, kinds)
        values = {name: _read(folder, name, kind, stored[name]) for name, kind in kinds.items()}
    except _UNREADABLE as error:
        raise CorruptError(
            f"{folder} is not a checkpoint of torch.distributed.checkpoint that Rekindle can "
            f"read safely: {str(error) or repr(error)}"
        ) from error
    return values, paths


class _Record:
    """An object from a pickle: only its arguments and attributes, without any code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})
        else:
            self.arguments = state


class _Unpickler(pickle.Unpickler):
    """Makes records. Raises UnpicklingError: the pickle requests another object."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"its pickle needs {module}.{name}")


# By name, the parts: the offsets of each in the complete tensor (None: the value is not a tensor),
# and the file and the bytes that hold it.
_Stored = Mapping[str, dict[tuple[int, ...] | None, _Record]]


def _stored(storage: Mapping[_Record, _Record]) -> _Stored:
    found: dict[str, dict[tuple[int, ...] | None, _Record]] = {}
    for index, info in storage.items():
        where = vars(index)
        if getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{where['fqn']} is compressed or transformed; save it without a transformation"
            )
        found.setdefault(where["fqn"], {})[where.get("offset")] = info
    return found


def _paths(metadata: _Record, kinds: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """Return each name's path: the planner's, or the name itself if no planner has saved paths."""
    planned = getattr(metadata, "planner_data", None)
    planned = planned if isinstance(planned, dict) else {}
    paths = {name: tuple(planned.get(name) or (name,)) for name in kinds}
    for name, path in paths.items():
        if not isinstance(name, str) or not all(type(key) in (str, int) for key in path):
            raise ValueError(f"the metadata has {name!r} at the invalid path {path!r}")
    return paths


def _read(folder: Path, name: str, kind: Any, parts: dict[Any, _Record]) -> Any:
    if type(kind).__name__ == "BytesStorageMetadata":
        return _load(folder, name, parts[None])
    dtype, shape = kind.properties.arguments[0], kind.size
    boxes = [(chunk.offsets, chunk.sizes) for chunk in kind.chunks]
    check_cover(name, shape, boxes)
    if not boxes or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has elements of an unknown type")
    needed = sum(math.prod(sizes) for _, sizes in boxes) * dtype.itemsize
    if needed > sum(vars(parts[offsets])["length"] for offsets, _ in boxes):
        raise ValueError(f"{name} needs {needed} bytes, but its files have fewer")
    whole = torch.empty(shape, dtype=dtype)
    for offsets, sizes in boxes:
        shard = _load(folder, name, parts[offsets])
        if not torch.is_tensor(shard) or shard.dtype != dtype or tuple(shard.shape) != sizes:
            raise ValueError(f"the shard of {name} at {offsets} is not {dtype} of {sizes}")
        place = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        whole[place].copy_(shard)
    return whole


def check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Check that the boxes cover each element once. Raises ValueError: they do not."""
    for offsets, sizes in boxes:
        if not fits(shape, (offsets, sizes)):
            raise ValueError(f"{name} of shape {shape} has a shard at {offsets} of {sizes}")
    volume = sum(math.prod(sizes) for _, sizes in boxes)
    filled = [box_at(*box) for box in boxes if math.prod(box[1])]
    pairs = itertools.combinations(filled, 2)
    if volume != math.prod(shape) or any(overlap(one, other) for one, other in pairs):
        raise ValueError(f"the shards of {name} do not make one tensor of shape {shape}")


def fits(shape: tuple[int, ...], box: Box) -> bool:
    """Return whether the box is inside a tensor of this shape."""
    offsets, sizes = box
    return len(shape) == len(offsets) == len(sizes) and all(
        0 <= a <= a + n <= most for a, n, most in zip(offsets, sizes, shape, strict=True)
    )


def _load(folder: Path, name: str, info: _Record) -> Any:
    """Return one stored value. Raises ValueError, CheckpointError, and torch.load's errors."""
    where = vars(info)
    file, begin, length = where["relative_path"], where["offset"], where["length"]
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"the metadata has {name} in {file!r}, which is outside of the folder")
    if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
        raise ValueError(f"the metadata has {name} at the invalid byte {begin!r} of {file}")
    with explained("read", folder / file):
        data = read_range(folder / file, begin, begin + length)
    if len(data) < length:
        raise CorruptError(f"{folder / file} ends before {name}, at byte {begin + len(data)}")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{name} in {folder} contains objects that need a pickle, so Rekindle does not load "
            f"it: {reason}"
        ) from error
