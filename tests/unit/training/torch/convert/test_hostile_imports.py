"""Imports of untrusted files execute no code, and refuse invalid content with one line."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_commands import Checkpoints, Trained
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rekindle.errors import CheckpointError, CorruptError
from rekindle.training.torch.convert.dcp_reader import read_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    """An object that creates a folder when a program unpickles it."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("executed",))


def refused(checkpoints: Checkpoints, source: str) -> str:
    done = checkpoints("import", source, "store", "--job-id", "job", "--step", 1)
    assert done.status in (1, 2), done
    assert "Traceback" not in done.err
    assert not Path("executed").exists()
    assert not Path("store").exists()
    return done.err


@pytest.fixture
def states() -> dict[str, Any]:
    trained = Trained()
    return {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}


@pytest.fixture
def folder(tmp_path: Path, states: dict[str, Any]) -> Path:
    dcp.save(states, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_file_with_more_than_tensors(checkpoints: Checkpoints, states: dict[str, Any]) -> None:
    """The import does not execute code in a file, and the error names the problem."""
    torch.save(states | {"extra": Evil()}, "evil.pt")
    assert "contains more than tensors and plain values, so Rekindle does not load it" in refused(
        checkpoints, "evil.pt"
    )
    Path("plain.pt").write_bytes(pickle.dumps(Evil()))
    refused(checkpoints, "plain.pt")


def test_files_of_another_kind(checkpoints: Checkpoints, states: dict[str, Any]) -> None:
    """The import refuses empty and truncated files, other data, lists, and files without states."""
    torch.save(states, "whole.pt")
    whole = Path("whole.pt").read_bytes()
    for content in (b"", b"hello", whole[:100], whole[: len(whole) // 2], whole[:-20]):
        Path("wrong.pt").write_bytes(content)
        refused(checkpoints, "wrong.pt")
    for value in ([1], {}, {"model": 3, "optimizer": None}, {1: {}}, {"model": {"w": {1, 2}}}):
        torch.save(value, "wrong.pt")
        refused(checkpoints, "wrong.pt")
    assert "the file or folder" in refused(checkpoints, "missing.pt")


def test_a_tensor_that_says_more_than_it_has(
    checkpoints: Checkpoints, states: dict[str, Any]
) -> None:
    """The import refuses one element repeated to a terabyte, which would fill the memory."""
    states["model"]["0.weight"] = torch.zeros(1).expand(1 << 38)
    torch.save(states, "huge.pt")
    assert "model.0.weight needs 1099511627776 bytes, but has 4" in refused(checkpoints, "huge.pt")


def test_metadata_that_act(checkpoints: Checkpoints, folder: Path) -> None:
    """The import does not execute the metadata of DCP, which are a pickle."""
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert "its pickle needs posix.mkdir" in refused(checkpoints, "dcp")
    for asked in (b"cbuiltins\neval\n.", b"ctorch\nload\n.", b"crekindle.cli\nmain\n."):
        (folder / ".metadata").write_bytes(asked)
        assert "its pickle needs" in refused(checkpoints, "dcp")


def test_a_value_that_acts(checkpoints: Checkpoints, states: dict[str, Any]) -> None:
    """The import does not execute values of DCP that are not tensors."""
    dcp.save(states | {"extra": Evil()}, checkpoint_id="dcp", no_dist=True)
    assert "extra in" in (error := refused(checkpoints, "dcp"))
    assert "contains objects that need a pickle" in error


def test_a_folder_of_another_kind(checkpoints: Checkpoints, folder: Path) -> None:
    """The import refuses a folder without metadata, or without a file that they name."""
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing" in refused(checkpoints, "dcp")
    shutil.rmtree(folder)
    folder.mkdir()
    assert "cannot read" in refused(checkpoints, "dcp")


def test_every_truncation_and_many_flips(folder: Path) -> None:
    """For damaged metadata or data, read_dcp() raises only CheckpointError.

    It may return other values for a flipped bit, because DCP has no checksums.
    """
    random.seed(0)
    for path in (folder / ".metadata", folder / "__0_0.distcp"):
        content = path.read_bytes()
        for at in random.sample(range(len(content)), 150):
            path.write_bytes(content[:at])
            with pytest.raises(CheckpointError):
                read_dcp(folder)
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            path.write_bytes(changed)
            try:
                read_dcp(folder)
            except CheckpointError:
                continue
        path.write_bytes(content)
    assert read_dcp(folder)


def metadata(
    chunks: list[tuple[Any, Any]], size: Any, info: _StorageInfo | None = None
) -> Metadata:
    """Return metadata of a tensor `w` in these pieces, which share the same bytes."""
    properties = TensorProperties(dtype=torch.float32)
    pieces = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in chunks]
    stored = info or stored_tensor(2)
    return Metadata(
        {"w": TensorStorageMetadata(properties, torch.Size(size), pieces)},
        {"w": ("w",)},
        {MetadataIndex("w", piece.offsets): stored for piece in pieces},
    )


def stored_tensor(count: int) -> _StorageInfo:
    torch.save(torch.ones(count), "dcp/file")
    return _StorageInfo("file", 0, Path("dcp/file").stat().st_size)


@pytest.mark.parametrize(
    ("chunks", "size"),
    [
        ([([0], [2])], [4]),  # a gap
        ([([0], [2]), ([1], [2])], [4]),  # an overlap with a gap
        ([([0], [2]), ([3], [2])], [4]),  # beyond the end
        ([([0], [3])], [3]),  # another shape than the stored tensor
        ([([0, 0], [2, 1])], [2]),  # another number of dimensions
        ([], [4]),
        ([], [0]),
        ([([0], [1 << 40])], [1 << 40]),  # far more than the stored data
    ],
)
def test_shards_that_make_no_tensor(
    chunks: Any, size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """read_dcp() never returns uninitialized memory as a state."""
    monkeypatch.chdir(tmp_path)
    Path("dcp").mkdir()
    Path("dcp/.metadata").write_bytes(pickle.dumps(metadata(chunks, size)))
    with pytest.raises(CorruptError, match="that Rekindle can read safely"):
        read_dcp(Path("dcp"))


def test_shards_that_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """read_dcp() joins correct shards in order."""
    monkeypatch.chdir(tmp_path)
    Path("dcp").mkdir()
    Path("dcp/.metadata").write_bytes(pickle.dumps(metadata([([0], [2]), ([2], [2])], [4])))
    assert torch.equal(read_dcp(Path("dcp"))[0]["w"], torch.ones(4))


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "", ".", "..", 3, None, "link", "a/../file"]
)
def test_files_outside_of_the_folder(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """read_dcp() reads only plain files of the folder."""
    monkeypatch.chdir(tmp_path)
    Path("dcp").mkdir()
    stored = stored_tensor(2)
    Path("dcp/link").symlink_to("file")
    stored.__dict__["relative_path"] = path
    Path("dcp/.metadata").write_bytes(pickle.dumps(metadata([([0], [2])], [2], stored)))
    with pytest.raises(CheckpointError):
        read_dcp(Path("dcp"))


def test_names_that_are_in_each_others_way(checkpoints: Checkpoints) -> None:
    """The import refuses a value with names below it, and a list index that is impossible."""
    for paths in ({"a": ("x",), "b": ("x", "y")}, {"a": ("x", 1 << 40)}, {"a": (None,)}):
        shutil.rmtree("dcp", ignore_errors=True)
        dcp.save({"a": 1, "b": 2}, checkpoint_id="dcp", no_dist=True)
        found = pickle.loads(Path("dcp/.metadata").read_bytes())
        found.planner_data = paths
        Path("dcp/.metadata").write_bytes(pickle.dumps(found))
        refused(checkpoints, "dcp")
