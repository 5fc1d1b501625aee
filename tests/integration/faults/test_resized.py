"""A stopped job continues with another number of ranks, from the same state, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training_jobs import resized
from training_jobs.job import Job
from training_jobs.memory import wait_sealed

from rekindle.checkpoints.manifest import MANIFEST_FILE, Manifest, decode
from rekindle.cli.main import main
from rekindle.engines.client import JobClient
from rekindle.recovery.journal import journal

SCRIPT = Path(resized.__file__)


def go_on(run: Job, ranks: int, steps: int, *more: str, nodes: int = 1) -> None:
    """Start the next attempt with this number of ranks."""
    run.start(
        nodes=nodes,
        processes_per_node=ranks // nodes,
        arguments=(*run.spec.arguments[:3], "--steps", str(steps), *more),
    )


def ended(run: Job, ranks: int, step: int) -> None:
    """Check that the attempt succeeded and started from the checkpoint of this step."""
    assert run.end().outcome == "succeeded", run.story()
    formed = run.events_of(journal.Formed)[-1]
    assert (formed.step, formed.sources) == (step, {"checkpoint": ranks})
    assert run.leftovers() == []


def state(run: Job, what: str, step: int, ranks: int) -> Any:
    """Return the state of all ranks together."""
    return json.loads((run.folder / f"{what}-{step}-of-{ranks}.json").read_text())


def losses(run: Job) -> list[float]:
    """Return the losses of all steps over all attempts, of all ranks together."""
    steps = {line["step"]: line["metrics"]["loss"] for line in run.record.lines(0)}
    return [steps[step] for step in sorted(steps)]


def newest(run: Job) -> tuple[Path, Manifest]:
    """Return the newest checkpoint."""
    [path, *_] = run.checkpoints()
    return path, decode((path / MANIFEST_FILE).read_bytes())


def export(store: Path, folder: Path, form: str) -> Any:
    """Return the newest checkpoint's complete state, loaded with torch."""
    out, whole = folder / form, folder / f"{form}.pt"
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", "export", str(store), str(out), "--format", form])
    assert not ended.value.code
    if form == "dcp":
        dcp_to_torch_save(out, whole)
    return torch.load(whole if form == "dcp" else out, weights_only=True)


def test_ddp_with_two_and_then_eight_ranks(job: Callable[..., Job]) -> None:
    """The training equals that of four ranks, within rounding."""
    settings = {"script": SCRIPT, "variant": "ddp", "snapshot_every": 0, "checkpoint_every": 6}
    straight, run = job(steps=18, **settings), job(steps=6, nodes=2, **settings)
    assert straight.end().outcome == "succeeded", straight.story()
    assert run.end().outcome == "succeeded", run.story()
    go_on(run, 2, 12)
    ended(run, 2, 6)
    assert state(run, "loaded", 6, 2) == state(run, "done", 6, 4)
    go_on(run, 8, 18, nodes=2)
    ended(run, 8, 12)
    assert state(run, "loaded", 12, 8) == state(run, "done", 12, 2)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-4)
    # The steps before the first change are equal bit by bit.
    assert losses(run)[:6] == losses(straight)[:6]
    assert state(run, "done", 6, 4) == state(straight, "done", 6, 4)


def test_fsdp_with_two_and_then_four_ranks(job: Callable[..., Job]) -> None:
    """A job with another number of ranks also continues from a stopped job's final checkpoint.

    Each file of a checkpoint describes its contents.
    """
    settings = {"script": SCRIPT, "variant": "fsdp", "checkpoint_every": 100}
    straight = job(steps=12, snapshot_every=0, **settings)
    run = job(steps=6, nodes=2, snapshot_every=4, **settings)
    assert straight.end().outcome == "succeeded", straight.story()
    assert run.end().outcome == "succeeded", run.story()
    path, manifest = newest(run)
    origin = manifest.origin
    assert (origin.layout.shards, origin.layout.mesh) == (4, {"shard": 4})
    assert origin.rng["seed"] == 11
    assert origin.versions.keys() == {"torch", "python"}
    with safetensors.safe_open(path / "state-00001.safetensors", "pt") as file:
        pieces = json.loads(file.metadata()["pieces"])
        assert pieces["model.0.up.weight"] == [[37, 16], [10, 0]]
        assert pieces["optimizer.state.0.exp_avg"] == pieces["model.0.scale"] == [[3], [1]]
        assert file.get_slice("model.0.up.weight").get_shape() == [10, 16]
    for form in ("torch", "dcp"):
        exported = export(path.parent, run.folder, form)
        done = state(run, "done", 6, 4)
        assert {name: resized.whole(exported[name]) for name in done} == done

    go_on(run, 2, 100, "--hold", "8")
    run.wait((run.folder / "done-8-of-2.json").exists, "eight steps")
    wait_sealed(run.agent_pid(0))
    JobClient(run.endpoint, run.directory.secret()).stop(by="a test")
    run.end()
    assert state(run, "loaded", 6, 2) == state(run, "done", 6, 4)
    assert newest(run)[1].step == 8

    go_on(run, 4, 12)
    ended(run, 4, 8)
    assert state(run, "loaded", 8, 4) == state(run, "done", 8, 2)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-4)
    assert losses(run)[:6] == losses(straight)[:6]
