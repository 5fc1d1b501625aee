"""Export to torch.save and DCP and import again: every bit, and the states in foreign files."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_commands import STATE, Checkpoints, Trained, bits, flip, place
from states import sealed
from torch import nn
from torch.distributed.checkpoint import format_utils

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.store import read_file
from rekindle.training.torch.convert.unsharded import Loaded
from rekindle.training.torch.state.capture import capture
from rekindle.training.torch.state.skeleton import tensor_specs
from rekindle.training.torch.state.snapshot import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


class Kinds:
    """A state of all kinds of values and tensors."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def all_kinds() -> Kinds:
    torch.manual_seed(5)
    tensors = {
        "half": torch.randn(3).half(),
        "eight": torch.randn(5).to(torch.float8_e4m3fn),
        "bools": torch.rand(7) > 0.5,
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7, dtype=torch.int16),
        "columns": torch.randn(4, 6).t(),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    values = {"none": None, "big": 2**70, "inf": float("inf"), "pair": (1, [2.5, "x"]), 3: {4: "y"}}
    return Kinds({**tensors, **values, "list": [torch.ones(2), {"deep": torch.zeros(1)}]})


def taken_up(store: DirectoryStore, named: dict[str, Any]) -> dict[str, Any]:
    """Return the states of live objects that loaded the newest checkpoint, as a Session does."""
    found = store.newest().checkpoint
    assert found
    load(named, sealed(read_file(found, STATE)))
    return {name: bits(thing.state_dict()) for name, thing in named.items()}


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_there_and_back(form: str, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """A Session loads exactly the exported state again; a second import changes nothing."""
    trained, kinds = Trained(), all_kinds()
    trained.keep(DirectoryStore(tmp_path / "store"), 7, kinds=kinds)
    done = checkpoints("export", "store", "out", "--format", form)
    assert (done.status, done.out) == (
        0,
        f"step 7: model, optimizer, scheduler, kinds: {tmp_path / 'out'}\n",
    )
    for word in ("imported", "existed already"):
        done = checkpoints("import", "out", "back", "--job-id", "job")
        assert done.status == 0, done.err
        assert "step 7, " in done.out
        assert word in done.out
    other = Trained(seed=1).named | {"kinds": Kinds()}
    found = taken_up(DirectoryStore(tmp_path / "back"), other)
    assert found == {n: bits(t.state_dict()) for n, t in (trained.named | {"kinds": kinds}).items()}


def test_a_file_as_torch_users_expect_it(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """torch.load with weights_only returns nested state dicts and the step."""
    assert checkpoints("export", "store", "out.pt", "--format", "torch", "--step", 10).status == 0
    found = torch.load("out.pt", weights_only=True)
    trained, other = Trained(10), Trained(1)
    assert found.keys() == {"model", "optimizer", "scheduler", "step"}
    assert found["step"] == 10
    for name, thing in other.named.items():
        thing.load_state_dict(found[name])
        assert bits(thing.state_dict()) == bits(trained.named[name].state_dict())
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith(".")]


def test_values_that_torch_does_not_load(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """An exported file has plain values in place of those that weights_only=True refuses."""
    state = {
        "array": np.arange(3),
        "words": np.array(["a"]),
        "day": np.array(["2026-01-02"], "datetime64[D]"),
        "set": {1},
        "queue": deque([Point(1, 2)], maxlen=2),
        "lists": defaultdict(list, {"a": [b"x"]}),
        "colour": Colour.RED,
        "path": Path("/a"),
        "complex": 1 + 2j,
        "generators": [np.random.default_rng(1), torch.Generator(), random.Random(1)],
        "numpy": np.random.get_state(),
        "sparse": torch.eye(2).to_sparse(),
        "wide": torch.ones(1, dtype=torch.complex128),
    }
    Trained().keep(DirectoryStore(tmp_path / "store"), 7, kinds=Kinds(state))
    assert checkpoints("export", "store", "out.pt", "--format", "torch").status == 0
    found = torch.load("out.pt", weights_only=True)["kinds"]
    assert found["array"].tolist() == [0, 1, 2]
    assert (found["words"], found["day"]) == (["a"], ["2026-01-02"])
    assert (found["set"], found["queue"]) == ([1], [(1, 2)])
    assert found["lists"]["a"][0].tolist() == [ord("x")]
    assert (found["colour"], found["path"], found["complex"]) == ("RED", "/a", [1.0, 2.0])
    assert found["sparse"].to_dense().tolist() == torch.eye(2).tolist()
    assert found["wide"].dtype is torch.complex128
    done = checkpoints("export", "store", "out", "--format", "dcp")
    assert done.status == 1
    assert "DCP cannot store this state: Cannot access storage of SparseTensorImpl" in done.err


def test_a_folder_as_dcp_users_expect_it(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """dcp.load() fills live state dicts, and format_utils converts the folder to a file."""
    assert checkpoints("export", "store", "out", "--format", "dcp").status == 0
    trained, other = Trained(15), Trained(1)
    state = {name: other.named[name].state_dict() for name in ("model", "optimizer")} | {"step": 0}
    dcp.load(state, checkpoint_id="out", no_dist=True)
    assert state["step"] == 15
    assert bits(state["model"]) == bits(trained.model.state_dict())
    other.optimizer.load_state_dict(state["optimizer"])
    assert bits(other.optimizer.state_dict()) == bits(trained.optimizer.state_dict())
    format_utils.dcp_to_torch_save("out", "file.pt")
    found = torch.load("file.pt", weights_only=True)
    assert bits(dict(found["model"])) == bits(dict(trained.model.state_dict()))


def test_only_some_objects(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`--only` exports the named objects; the error for another name lists the valid names."""
    assert (
        checkpoints("export", "store", "m.pt", "--format", "torch", "--only", "model").status == 0
    )
    assert torch.load("m.pt", weights_only=True).keys() == {"model", "step"}
    done = checkpoints("export", "store", "e.pt", "--format", "torch", "--only", "ema")
    assert done.status == 2
    assert "has no 'ema', but model, optimizer, scheduler" in done.err


def test_nothing_is_written_over(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """The command refuses an existing target or a missing folder before it reads a checkpoint."""
    Path("out.pt").write_text("of the user's")
    for out, error in (
        ("out.pt", "exists already"),
        ("no/out.pt", "does not exist; create it first"),
    ):
        done = checkpoints("export", "store", out, "--format", "torch")
        assert (done.status, done.out) == (2, "")
        assert error in done.err
        assert "verify" not in done.err
    assert Path("out.pt").read_text() == "of the user's"


def test_a_damaged_checkpoint_is_not_exported(
    store: DirectoryStore, checkpoints: Checkpoints
) -> None:
    """The command refuses a damaged step, and without a step exports the newest intact one."""
    flip(place(store, 15) / STATE, -1)
    done = checkpoints("export", "store", "out", "--format", "dcp", "--step", 15)
    assert done.status == 1
    assert "no intact checkpoint of step 15" in done.err
    assert not Path("out").exists()
    done = checkpoints("export", "store", "out", "--format", "dcp")
    assert done.out.startswith("step 10: ")
    assert "skipped" in done.err


def test_tied_weights_are_tied_again(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """A file of torch.save keeps tied weights in one memory; DCP has both names."""

    def tied(seed: int) -> Trained:
        trained = Trained(seed)
        trained.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        trained.model[1].weight = trained.model[0].weight
        trained.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1, momentum=0.9)
        return trained

    first = tied(0)
    first.keep(DirectoryStore(tmp_path / "store"), 1)
    for form in ("torch", "dcp"):
        assert checkpoints("export", "store", form, "--format", form).status == 0
        assert checkpoints("import", form, f"{form}.back", "--job-id", "job").status == 0
        found = taken_up(DirectoryStore(tmp_path / f"{form}.back"), tied(1).named)
        assert found == {name: bits(thing.state_dict()) for name, thing in first.named.items()}


FOREIGN = {
    "tutorial": lambda t: {
        "epoch": 3,
        "model_state_dict": t.model.state_dict(),
        "optimizer_state_dict": t.optimizer.state_dict(),
        "lr_scheduler": t.scheduler.state_dict(),
        "loss": 0.25,
    },
    "ddp": lambda t: {
        "model": OrderedDict((f"module.{k}", v) for k, v in t.model.state_dict().items()),
        "optimizer": t.optimizer.state_dict(),
        "scheduler": t.scheduler.state_dict(),
        "global_step": torch.tensor(40),
    },
    "names": lambda t: {
        "net": {f"_orig_mod.{k}": v for k, v in t.model.state_dict().items()},
        "optim": by_names(t),
        "scheduler": t.scheduler.state_dict(),
    },
}


def by_names(trained: Trained) -> dict[str, Any]:
    """Return the state of an optimizer as torch.distributed.checkpoint.state_dict has it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(trained.model, trained.optimizer)


@pytest.mark.parametrize("form", ["torch", "dcp"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_others_have_saved(
    kind: str, form: str, tmp_path: Path, checkpoints: Checkpoints
) -> None:
    """The import accepts usual names, prefixes of wrappers, and optimizers by parameter name."""
    trained = Trained()
    # DCP converts the numbers in a Counter to text, so it cannot restore milestones.
    trained.scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 3)
    states = FOREIGN[kind](trained)
    if form == "torch":
        torch.save(states, "foreign")
    else:
        dcp.save(states, checkpoint_id="foreign", no_dist=True)
    done = checkpoints("import", "foreign", "store", "--job-id", "job", "--step", 30)
    assert done.status == 0, done.err
    assert ("left out: epoch, loss" in done.err) == (kind == "tutorial")
    other = Trained(1)
    other.scheduler = torch.optim.lr_scheduler.StepLR(other.optimizer, 9)
    found = taken_up(DirectoryStore(tmp_path / "store"), other.named)
    assert found == {name: bits(thing.state_dict()) for name, thing in trained.named.items()}


def test_states_by_hand(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """--take maps other names, --add adds missing objects, and --step gives a missing step."""
    trained = Trained()
    torch.save({"a": trained.model.state_dict(), "b": trained.optimizer.state_dict()}, "f.pt")
    arguments = ["import", "f.pt", "store", "--job-id", "job"]
    assert "has no 'model'" in checkpoints(*arguments).err
    arguments += ["--take", "model=a", "--take", "optimizer=b"]
    assert "give it with --step N" in checkpoints(*arguments).err
    arguments += ["--add", 'sampler={"position": 64, "length": 512, "seed": 3, "shuffle": true}']
    done = checkpoints(*arguments, "--step", 4)
    assert done.status == 0, done.err
    (info,) = DirectoryStore(tmp_path / "store").survey()
    assert info.manifest
    assert info.manifest.data_position == {
        "position": 64,
        "length": 512,
        "seed": 3,
        "shuffle": True,
    }
    for wrong in (["--take", "model"], ["--add", "x={"], ["--take", "ema=z"], ["--step", -1]):
        assert checkpoints(*arguments, *wrong).status == 2


def test_states_for_a_device(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """With --device, model and moments are on the device; Adam counts its steps on the CPU."""
    trained = Trained()
    torch.save({"model": trained.model.state_dict(), "optimizer": by_names(trained)}, "f.pt")
    arguments = ["import", "f.pt", "store", "--job-id", "job", "--step", 1]
    assert checkpoints(*arguments, "--device", "cuda").status == 0
    found = DirectoryStore(tmp_path / "store").newest().checkpoint
    assert found
    devices = {
        spec.name.rpartition(".")[2]: spec.device
        for node in Loaded(found, STATE).tree.values()
        for spec in tensor_specs(node)
    }
    assert devices["weight"] == devices["exp_avg"] == "cuda"
    assert devices["step"] == "cpu"


def test_a_place_of_another_jobs(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """The import does not change the checkpoint of another job, and refuses an invalid job id."""
    trained = Trained()
    torch.save({"model": trained.model.state_dict(), "optimizer": by_names(trained)}, "f.pt")
    done = checkpoints("import", "f.pt", "store", "--job-id", "other", "--step", 15)
    assert done.status == 1
    assert "is a checkpoint of job 'job'; use another location for job 'other'" in done.err
    assert checkpoints("import", "f.pt", "new", "--job-id", "No Such", "--step", 1).status == 2
    assert bits(capture(Trained(15).named).tensors) == bits(_tensors(store))


def test_a_step_that_the_store_has(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """Other content of the same step is refused; a newer checkpoint of the store is named."""
    trained = Trained()
    torch.save({"model": trained.model.state_dict(), "optimizer": by_names(trained)}, "f.pt")
    arguments = ["import", "f.pt", "store", "--job-id", "job", "--step"]
    done = checkpoints(*arguments, 15)
    assert (done.status, done.out) == (1, "")
    assert f"{place(store, 15)} exists already, with other content" in done.err
    done = checkpoints(*arguments, 3)
    assert done.status == 0
    assert f"a job continues from that one: {place(store, 15)}" in done.err
    assert "continues from" not in checkpoints(*arguments, 16).err


def _tensors(store: DirectoryStore) -> dict[str, torch.Tensor]:
    found = store.newest().checkpoint
    assert found
    return Loaded(found, STATE).tensors
