"""The text and the model of the example: identical on every rank, and able to learn."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import ROOT

FOLDER = ROOT / "examples" / "charlm"


def example(name: str) -> ModuleType:
    """Import a module of the example under a name that no other package has."""
    spec = importlib.util.spec_from_file_location(f"charlm_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


corpus, model = example("corpus"), example("model")


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread, because such small steps are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return model.GPT(model.SIZES["tiny"])


@pytest.mark.process
def test_the_text_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Ranks with another hash seed and another working directory read the same characters."""
    code = (
        "import hashlib, corpus; texts = corpus.load(300_000);"
        "print([hashlib.sha256(text.numpy()).hexdigest() for text in texts])"
    )
    seen = set()
    for hash_seed in ("1", "2"):
        folder = tmp_path / hash_seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(FOLDER)}
        done = subprocess.run(
            [sys.executable, "-B", "-c", code],
            cwd=folder,
            env=environment,
            capture_output=True,
            check=True,
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def test_the_text_is_python_source_of_the_size_asked_for() -> None:
    """The text has exactly the requested size, few unknown characters, and Python code."""
    training, validation = corpus.load(300_000)
    assert (len(training), len(validation)) == (285_000, 15_000)
    assert training.dtype == torch.uint8
    assert (training == corpus.UNKNOWN).float().mean() < 0.001
    text = "".join((corpus.CHARACTERS + "?")[number] for number in training.tolist())
    assert text.count("\n    def ") > 100
    assert text.count("\nimport ") > 20


def test_a_limit_above_the_whole_library_gives_all_of_it() -> None:
    """If the limit is larger than the library, load() returns each file once."""
    training, validation = corpus.load(10**9)
    assert len(training) + len(validation) > 5_000_000
    paths = list(corpus._sources())
    assert len(paths) == len(set(paths))


def test_windows_predict_each_character_once() -> None:
    """Windows do not overlap, and the targets are the inputs shifted by one character."""
    text = torch.arange(97, dtype=torch.uint8)
    windows = corpus.Windows(text, 8)
    assert len(windows) == 12
    inputs, targets = windows.batch(range(12))
    assert inputs.dtype == targets.dtype == torch.long
    assert inputs.flatten().tolist() == list(range(96))
    assert targets.flatten().tolist() == list(range(1, 97))


def test_a_data_loader_gives_the_same_samples_as_a_batch() -> None:
    """A data loader and batch() return the same samples."""
    windows = corpus.Windows(corpus.load(50_000)[0], 16)
    loader = torch.utils.data.DataLoader(windows, batch_sampler=[[5, 0, 7]])
    for one, other in zip(next(iter(loader)), windows.batch([5, 0, 7]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("tiny", 116_608), ("small", 4_821_504), ("medium", 85_401_600), ("large", 353_419_264)],
)
def test_sizes_have_the_stated_number_of_parameters(size: str, parameters: int) -> None:
    """Each size has the number of parameters of the README, and the vocabulary of the text."""
    with torch.device("meta"):
        gpt = model.GPT(model.SIZES[size])
    assert sum(parameter.numel() for parameter in gpt.parameters()) == parameters
    assert gpt.head.out_features == corpus.VOCABULARY


def test_the_model_learns() -> None:
    """Within 60 steps the loss falls from that of a random guess to less than two thirds of it."""
    windows = corpus.Windows(corpus.load(1_000_000)[0], 64)
    gpt, losses = tiny(), []
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    for step in range(60):
        loss = gpt(*windows.batch(range(step * 8, step * 8 + 8)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert 4.4 < losses[0] < 4.8  # the logarithm of 97, the size of the vocabulary, is 4.57
    assert sum(losses[-10:]) / 10 < 3.0


def test_the_model_does_not_see_the_future() -> None:
    """A changed character does not change any prediction before it."""
    gpt, seen = tiny().eval(), []
    gpt.head.register_forward_hook(lambda _, __, logits: seen.append(logits[0]))
    one = torch.arange(64)[None] % 50
    other = one.clone()
    other[0, 40] = 90
    for inputs in (one, other):
        gpt(inputs, one)
    assert torch.equal(seen[0][:40], seen[1][:40])
    assert not torch.equal(seen[0][40], seen[1][40])


def test_dropout_makes_training_depend_on_the_random_state() -> None:
    """The loss differs between calls, repeats with the same seed, and is constant in evaluation."""
    gpt, inputs = tiny(), torch.arange(64)[None]
    torch.manual_seed(1)
    first, second = gpt(inputs, inputs).item(), gpt(inputs, inputs).item()
    torch.manual_seed(1)
    assert gpt(inputs, inputs).item() == first != second
    gpt.eval()
    assert gpt(inputs, inputs).item() == gpt(inputs, inputs).item()


@pytest.mark.process
def test_the_example_of_an_evaluation_measures_a_checkpoint(tmp_path: Path) -> None:
    """evaluate.py reads the model of a checkpoint, and writes the loss on held-out text."""
    trained = tiny()
    optimizer = torch.optim.AdamW(trained.parameters())
    states = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "state.pt")
    store, metrics = tmp_path / "store", tmp_path / "metrics.json"
    cli = [sys.executable, "-m", "rekindle.cli.main", "checkpoints", "import"]
    job = ["--job-id", "charlm", "--step", "7"]
    subprocess.run([*cli, str(tmp_path / "state.pt"), str(store), *job], check=True)
    (checkpoint,) = store.glob("step-*")
    given = {"REKINDLE_CHECKPOINT": str(checkpoint), "REKINDLE_METRICS": str(metrics)}
    command = [sys.executable, str(FOLDER / "evaluate.py")]
    subprocess.run(command, check=True, env={**os.environ, **given})
    loss = json.loads(metrics.read_text())["val_loss"]
    assert 3.0 < loss < 7.0  # an untrained model of 97 characters: about log(97)
