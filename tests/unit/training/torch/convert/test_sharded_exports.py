"""States in several files: joined if each file has its position, and refused otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoint_commands import Checkpoints, Trained, bits
from stores import manifest

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.format import plan_layout, state_file, write_header
from rekindle.checkpoints.store import CheckpointFile
from rekindle.rank.snapshot_writer import METADATA_SKELETON
from rekindle.training.torch.state.capture import as_bytes, capture
from rekindle.training.torch.state.sharding import METADATA_PIECES
from rekindle.training.torch.state.skeleton import DTYPE_CODES

SHARDS = 3
Pieces = dict[str, Any]


def file_of(tree: Any, tensors: Mapping[str, torch.Tensor], pieces: Pieces | None) -> memoryview:
    """Return a state file in the form that a rank writes."""
    metadata = {METADATA_SKELETON: msgspec.json.encode(tree).decode()}
    if pieces is not None:
        metadata[METADATA_PIECES] = msgspec.json.encode(pieces).decode()
    layout = plan_layout(
        ((name, DTYPE_CODES[t.dtype], t.shape) for name, t in tensors.items()), 100_000
    )
    buffer = memoryview(bytearray(layout.total_bytes))
    write_header(layout, metadata, buffer)
    for spec in layout.specs:
        begin = layout.header_bytes + spec.begin
        buffer[begin : begin + spec.end - spec.begin] = bytes(as_bytes(tensors[spec.name]).tolist())
    return buffer


def shard(node: Any, number: int, cut: Any, found: dict[str, torch.Tensor], pieces: Pieces) -> Any:
    """Return the node with its tensors cut by rows, as FSDP cuts them."""
    if isinstance(node, list):
        return [shard(each, number, cut, found, pieces) for each in node]
    if not isinstance(node, dict):
        return node
    [(kind, body)] = node.items()
    if kind != "tensor":
        return {kind: shard(body, number, cut, found, pieces)}
    name, code, shape, device, _ = body
    if not shape or not cut(name):
        return node
    rows = -(-shape[0] // SHARDS)
    begin = min(number * rows, shape[0])
    found[name] = found[name][begin : begin + rows]
    pieces[name] = [shape, [begin, *[0] * (len(shape) - 1)]]
    return {"shard": [name, code, list(found[name].shape), device, None]}


def keep(folder: Path, trained: Trained, *, tell: bool, cut: Any = lambda _: True) -> None:
    """Write the state in shards."""
    state = capture(trained.named)
    parts = {}
    for number in range(SHARDS):
        tensors, pieces = dict(state.tensors), {}
        whole = msgspec.json.decode(state.skeleton)
        tree = {name: shard(node, number, cut, tensors, pieces) for name, node in whole.items()}
        data = file_of(tree, tensors, pieces if tell else None)
        parts[state_file(number)] = CheckpointFile([data], (number,))
    DirectoryStore(folder).write(manifest(9), parts)


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_shards_that_tell_their_place(form: str, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Shards with positions become complete, identical tensors, also with an empty shard."""
    trained = Trained()
    keep(tmp_path / "store", trained, tell=True)
    done = checkpoints("export", "store", "out", "--format", form)
    assert done.status == 0, done.err
    done = checkpoints("import", "out", "back", "--job-id", "job")
    assert done.status == 0, done.err
    checkpoints("export", "back", "whole.pt", "--format", "torch")
    found = torch.load("whole.pt", weights_only=True)
    for name, thing in trained.named.items():
        assert bits(found[name]) == bits(thing.state_dict())


def test_shards_that_do_not(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The export refuses shards without positions.

    `--only` can export complete objects, for example the model with ZeRO.
    """
    trained = Trained()
    keep(tmp_path / "store", trained, tell=False, cut=lambda name: name.startswith("optimizer"))
    export = ("export", "store", "out", "--format", "torch")
    done = checkpoints(*export)
    assert done.status == 1
    assert (
        "the state of 'optimizer' is in 3 pieces, and the checkpoint does not have their positions"
        in done.err
    )
    assert not Path("out").exists()
    assert checkpoints(*export, "--only", "model", "--only", "scheduler").status == 0
    found = torch.load("out", weights_only=True)
    assert bits(found["model"]) == bits(trained.model.state_dict())


def test_files_that_hold_different_states(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The export refuses different states of one shape, because their relation is unknown."""
    parts = {}
    for number in range(2):
        state = capture(Trained(number).named)
        data = file_of(msgspec.json.decode(state.skeleton), state.tensors, None)
        parts[state_file(number)] = CheckpointFile([data], (number,))
    DirectoryStore(tmp_path / "store").write(manifest(9), parts)
    done = checkpoints("export", "store", "out", "--format", "dcp")
    assert done.status == 1
    assert "the state of 'model' is in 2 pieces" in done.err


@pytest.mark.parametrize(
    "pieces",
    [
        [[5, 6], [0, 0]],  # the same position twice
        [[50, 6], [0, 0]],  # far larger than all parts
        [[5, 6], [4, 0]],  # beyond the end
        [[5], [0]],  # another number of dimensions
        [[-1, 6], [0, 0]],
        [[5, 6], [-1, 0]],
        "nonsense",
    ],
)
def test_places_that_cannot_be(pieces: Any, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The export never writes uninitialized memory."""
    parts = {}
    for number in range(2):
        state = capture(Trained().named)
        tree = msgspec.json.decode(state.skeleton)
        data = file_of(tree, state.tensors, {"model.0.weight": pieces})
        parts[state_file(number)] = CheckpointFile([data], (number,))
    DirectoryStore(tmp_path / "store").write(manifest(9), parts)
    done = checkpoints("export", "store", "out", "--format", "dcp")
    assert done.status == 1
    assert "Traceback" not in done.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"what": 3}},
        {"model": {"tensor": ["no", "F32", [2], "cpu", None]}},
        {"model": {"tensor": []}},
        {"model": {"numpy": ["nonsense", 1]}},
        {"model": {"dict": [[[], 1]]}},
        {"model": {"int": "x"}},
        [1],
        {"model": {"dict": 7}},
    ],
)
def test_skeletons_that_cannot_be(tree: Any, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The export refuses a checkpoint with an invalid skeleton."""
    part = CheckpointFile([file_of(tree, {"w": torch.ones(2)}, None)], (0,))
    DirectoryStore(tmp_path / "store").write(manifest(9), {state_file(0): part})
    done = checkpoints("export", "store", "out", "--format", "torch")
    assert done.status == 1
    assert "does not contain a readable state" in done.err
