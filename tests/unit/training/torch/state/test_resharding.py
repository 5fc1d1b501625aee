"""Another number of ranks loads a checkpoint: each rank gets exactly its piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rekindle.checkpoints import block_checksums as blocks
from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.format import plan_layout, read_header, state_file, write_header
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.store import CheckpointFile
from rekindle.errors import CorruptError, SessionError
from rekindle.rank.progress import RankPlace
from rekindle.rank.snapshot_writer import METADATA_SKELETON
from rekindle.training.torch import init_placeholder_group
from rekindle.training.torch.state import checkpoint
from rekindle.training.torch.state.capture import DTYPE_CODES, capture
from rekindle.training.torch.state.checkpoint import load_checkpoint
from rekindle.training.torch.state.sharding import metadata_of

MADE = (3, 1)


class Network(nn.Module):
    """A model with uneven rows, with fewer rows than ranks, and with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 13), nn.Linear(6, 13, bias=False)
        self.two.weight = self.one.weight
        # Tied weights of which most ranks have no piece.
        self.three, self.four = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
        self.four.weight = self.three.weight
        self.few = nn.Parameter(torch.randn(3, 2, 2))
        self.fine = nn.Parameter(torch.randn(7, 5).to(torch.bfloat16))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.tensor(17))


class Extra:
    """The script's own state: a distributed tensor in a list, a number, and a plain tensor."""

    def __init__(self, like: torch.Tensor, number: int) -> None:
        self.state = {"average": [like.detach() * 2], "number": number, "own": torch.ones(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@contextmanager
def rank_of(
    sizes: tuple[int, ...], rank: int, seed: int
) -> Iterator[tuple[dict[str, Any], RankPlace]]:
    """Yield the objects and the place of one rank in a mesh of these sizes.

    (): whole tensors, as with DDP. Two sizes: replicated along the first. The same seed gives the
    same whole on every rank.
    """
    world = torch.Size(sizes).numel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world))
        if sizes:
            init_placeholder_group()
        try:
            torch.manual_seed(seed)
            model: nn.Module = Network()
            wholes = [torch.randn_like(p) for p in model.parameters()]
            mesh = None
            if sizes:
                # The name has the rank, because torch's cache would return another rank's mesh.
                names = ("replicate", f"shard {rank}")[-len(sizes) :]
                mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
                fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for parameter, gradient in zip(model.parameters(), wholes, strict=True):
                parameter.grad = like(parameter, gradient)
            optimizer.step()
            extra = Extra(model.one.weight, seed)
            named = {"model": model, "optimizer": optimizer, "extra": extra}
            shards = sizes[-1] if sizes else 1
            own = rank % shards if shards > 1 else None
            place = RankPlace(rank, own, shards=shards, mesh={"shard": shards} if sizes else None)
            yield named, place
        finally:
            if sizes:
                dist.destroy_process_group()


def like(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return the rank's piece of a whole tensor, sharded like a parameter."""
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor

    shard = parameter.placements.index(next(p for p in parameter.placements if p.is_shard()))
    ranks = parameter.device_mesh.size(shard)
    at = parameter.device_mesh.get_coordinate()[shard]
    pieces = [*whole.chunk(ranks), *[whole[:0]] * ranks]
    own = pieces[at].clone()
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def file_of(named: dict[str, Any], place: RankPlace, **changes: str) -> bytearray:
    """Return the file that the rank's agent writes."""
    state = capture(named)
    metadata = {METADATA_SKELETON: state.skeleton.decode(), **metadata_of(state, place, seed=5)}
    metadata |= changes
    described = ((name, DTYPE_CODES[t.dtype], tuple(t.shape)) for name, t in state.tensors.items())
    layout = plan_layout(described, metadata_room=1 << 16)
    file = bytearray(layout.total_bytes)
    write_header(layout, metadata, memoryview(file))
    for spec in layout.specs:
        begin = layout.header_bytes + spec.begin
        data = state.tensors[spec.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        file[begin : begin + len(data)] = data
    return file


def written(root: Path, *files: bytearray) -> Path:
    """Write a checkpoint of these files, and return its folder."""
    manifest = Manifest(
        job_id="job",
        step=MADE[0],
        generation=MADE[1],
        world_size=len(files),
        framework="torch",
        created=0.0,
        writer="",
        rekindle="",
    )
    parts = {state_file(n): CheckpointFile([file], (n,)) for n, file in enumerate(files)}
    DirectoryStore(root).write(manifest, parts)
    return root


def checkpoint_of(root: Path, sizes: tuple[int, ...], seed: int = 1) -> Path:
    """Write the checkpoint of the ranks of a mesh, and return its folder."""
    files = []
    for rank in range(sizes[-1] if sizes else 1):
        with rank_of(sizes, rank, seed) as (named, place):
            files.append(file_of(named, place))
    return written(root, *files)


@pytest.mark.parametrize("before", [(), (1,), (3,), (8,)], ids=str)
def test_every_rank_has_its_piece(
    before: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the number of ranks, each rank loads exactly its piece of every tensor.

    The tensors are parameters, buffers, moments and the script's own, whole or in pieces.
    """
    # Small limits, as for big tensors: many blocks, and direct reads of some of them.
    monkeypatch.setattr(blocks, "BLOCK", 64)
    monkeypatch.setattr(checkpoint, "_TAKE_BYTES", 40)
    monkeypatch.setattr(checkpoint, "_STRAIGHT_BYTES", 100)
    root = checkpoint_of(tmp_path, before)
    for after in ((), (1,), (2,), (2, 3), (8,)):
        for rank in range(torch.Size(after).numel()):
            with rank_of(after, rank, seed=1) as (named, place):
                wanted = bytes(file_of(named, place))
            with rank_of(after, rank, seed=2) as (named, place):
                assert bytes(file_of(named, place)) != wanted
                load_checkpoint(str(root), named, MADE, place)
                assert bytes(file_of(named, place)) == wanted, (after, rank)
                assert named["model"].two.weight is named["model"].one.weight


def test_only_the_files_that_are_needed_are_read(tmp_path: Path) -> None:
    """A rank reads only the files that have its pieces, so damage of other files has no effect."""
    root = checkpoint_of(tmp_path, (8,))
    for file in ("state-00000.safetensors", "state-00003.safetensors"):
        [path] = root.glob(f"*/{file}")
        path.write_bytes(bytes(path.stat().st_size))
    with rank_of((1, 8), 5, seed=2) as (named, place):
        load_checkpoint(str(root), named, MADE, place)
    with rank_of((4,), 3, seed=2) as (named, place):
        load_checkpoint(str(root), named, MADE, place)
    with rank_of((4,), 1, seed=2) as (named, place), pytest.raises(CorruptError):
        load_checkpoint(str(root), named, MADE, place)


def test_what_ranks_have_of_their_own_is_the_files_in_their_place(tmp_path: Path) -> None:
    """A rank takes unsharded values of its own from the file at the same relative place.

    Two ranks take the first and the third of four files. Four ranks take each of two files twice.
    """
    for before, after, taken in ((4, 2, [0, 2]), (2, 4, [0, 0, 1, 1])):
        files = []
        for rank in range(before):
            with rank_of((before,), rank, seed=1) as (named, place):
                named["extra"].state["number"] = rank
                named["extra"].state["own"] = torch.tensor([rank, rank])
                files.append(file_of(named, place))
        root = written(tmp_path / str(before), *files)
        for rank in range(after):
            with rank_of((after,), rank, seed=2) as (named, place):
                named["extra"].state["own"] = torch.tensor([9, 9])
                load_checkpoint(str(root), named, MADE, place)
                assert named["extra"].state["number"] == taken[rank]
                assert named["extra"].state["own"].tolist() == [taken[rank]] * 2


def test_another_model(tmp_path: Path) -> None:
    """If the checkpoint has another model, the error names the tensor that differs."""
    root = checkpoint_of(tmp_path, (4,))
    with rank_of((2,), 0, seed=2) as (named, place):
        named["extra"].state["average"] = [like(named["model"].few, torch.randn(9, 1))]
        with pytest.raises(
            SessionError, match=r"extra\.average\.0 has shape \[13, 6\] in the state"
        ):
            load_checkpoint(str(root), named, MADE, place)
    with rank_of((2,), 0, seed=2) as (named, place):
        named["extra"].state["average"] = []
        with pytest.raises(
            SessionError, match=r"cannot read how the tensor extra\.average\.0 is sharded"
        ):
            load_checkpoint(str(root), named, MADE, place)


def test_pieces_that_only_the_script_knows(tmp_path: Path) -> None:
    """If only the script knows the pieces, the same number of ranks can load them, and no other."""
    files = []
    for shard in range(2):
        with rank_of((), 0, seed=shard) as (named, _):
            files.append(file_of(named, RankPlace(shard, shard, shards=2)))
    root = written(tmp_path, *files)
    with rank_of((), 0, seed=9) as (named, _):
        load_checkpoint(str(root), named, MADE, RankPlace(1, 1, shards=2))
        assert bytes(file_of(named, RankPlace(1, 1, shards=2))) == bytes(files[1])
        for place in (RankPlace(0), RankPlace(0, 2, shards=4)):
            with pytest.raises(
                SessionError,
                match=r"in 2 pieces, but this job has [14], and Rekindle does not know",
            ):
                load_checkpoint(str(root), named, MADE, place)


@pytest.mark.parametrize("pieces", ["{}", "[", '{"model.one.weight":[[99,6],[0,0]]}'])
def test_pieces_that_cannot_be(pieces: str, tmp_path: Path) -> None:
    """Rekindle refuses a file with an invalid description of its pieces."""
    files = []
    for rank in range(2):
        with rank_of((2,), rank, seed=1) as (named, place):
            files.append(file_of(named, place, pieces=pieces))
    assert read_header(files[0]).metadata["pieces"] == pieces
    root = written(tmp_path, *files)
    with rank_of((4,), 0, seed=2) as (named, place), pytest.raises((CorruptError, SessionError)):
        load_checkpoint(str(root), named, MADE, place)


def test_a_piece_that_no_file_has(tmp_path: Path) -> None:
    """If no file has a piece, Rekindle refuses the checkpoint, even if its manifest is valid."""
    with rank_of((4,), 0, seed=1) as (named, place):
        first = file_of(named, place)
    root = written(tmp_path, first, first)
    with (
        rank_of((4,), 3, seed=2) as (named, place),
        pytest.raises(CorruptError, match="no file has all of"),
    ):
        load_checkpoint(str(root), named, MADE, place)
