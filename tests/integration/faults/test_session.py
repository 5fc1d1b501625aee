"""Wrong uses of Session, and a Session without an agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training_jobs import RANKS
from training_jobs.injection import write_faults
from training_jobs.job import STEPS, Job
from training_jobs.processes import SCRIPT, environment
from training_jobs.record import Record
from waiting import run_command

from rekindle import names
from rekindle.errors import SessionError
from rekindle.training.torch import MicroBatch, Session, StepSampler
from rekindle.training.torch.data import random_streams as rng


@pytest.fixture
def model() -> torch.nn.Module:
    """Return a module with parameters."""
    return torch.nn.Linear(2, 1)


@pytest.fixture
def process_group() -> Iterator[None]:
    """Create a default process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def session_of(model: torch.nn.Module, **settings: object) -> Session:
    """Return a session with an optimizer."""
    return Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_ddp_wrapper_is_refused(model: torch.nn.Module, process_group: None) -> None:
    """Session refuses torch's DDP as its model; the error names the import to change."""
    with pytest.raises(SessionError, match=r"from rekindle\.training\.torch instead.* ddp=True"):
        session_of(DistributedDataParallel(model))


def test_process_group_of_the_script_is_refused(
    model: torch.nn.Module, process_group: None
) -> None:
    """Session refuses an existing process group; the error names the call for its place."""
    with pytest.raises(
        SessionError, match=r"init_process_group by rekindle\.training\.torch\.init"
    ):
        session_of(model)


@pytest.mark.parametrize("value", [object(), {"key": {1, 2j}}, float, 10**400, [[10**400]]])
def test_value_that_cannot_be_logged(value: object, model: torch.nn.Module) -> None:
    """step.log refuses a value that is not a number, text or list; the error names the step."""
    with session_of(model) as session:
        for step in session.steps(1):
            with step, pytest.raises(SessionError, match=r"step\.log of step 0"):
                step.log(thing=value)


def test_missing_sampler(model: torch.nn.Module) -> None:
    """Without a sampler, the error about samples names the missing argument."""
    with session_of(model) as session:
        for step in session.steps(1):
            with step, pytest.raises(SessionError, match="give Session a sampler"):
                _ = step.indices
            with step, pytest.raises(SessionError, match="give Session a sampler"):
                step.parts()


def test_one_part_is_the_whole_step(model: torch.nn.Module) -> None:
    """If each rank has one share, a step has one part with all its samples and weight 1."""
    for keep in (False, True):
        sampler = StepSampler(10, 3)
        with session_of(model, sampler=sampler, keep_global_batch=keep) as session:
            for step in session.steps(2):
                with step:
                    expected = [MicroBatch(sampler.indices(), 1.0)]
                    assert list(step.parts()) == expected
        assert sampler.position == 6


def test_several_parts_have_the_shares_of_the_full_world(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of a world of three does three shares, with the random numbers of the three ranks."""
    monkeypatch.setenv(names.ENV_FULL_WORLD, "3")
    with session_of(
        model, sampler=StepSampler(9, 3, shuffle=False), keep_global_batch=True, seed=5
    ) as session:
        for step in session.steps(1):
            with step:
                drawn = [(part, torch.rand(1).item()) for part in step.parts()]
    for rank, (part, number) in enumerate(drawn):
        rng.begin_step(5, rank, 0)
        assert number == torch.rand(1).item()
        assert part == MicroBatch([3 * rank, 3 * rank + 1, 3 * rank + 2], 1 / 3)


def test_indices_are_refused_where_there_may_be_parts(model: torch.nn.Module) -> None:
    """step.indices is an error in the full world if it would be wrong in a smaller one."""
    settings = {"sampler": StepSampler(10, 3), "keep_global_batch": True}
    with session_of(model, **settings) as session:
        step = next(session.steps(1))
        with pytest.raises(SessionError, match=r"for part in step\.parts\(\)"), step:
            _ = step.indices
        with pytest.raises(SessionError, match="before the script had used all of its parts"), step:
            pass
        assert session.finished == 0


def test_parts_that_are_left_out_are_an_error(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that leaves out parts is an error: its peers would wait for the last part."""
    monkeypatch.setenv(names.ENV_FULL_WORLD, "2")
    settings = {"sampler": StepSampler(10, 3), "keep_global_batch": True}
    with session_of(model, **settings) as session:
        step = next(session.steps(1))
        with pytest.raises(SessionError, match="before the script had used all of its parts"), step:
            next(step.parts())
        assert session.finished == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give Session a StepSampler"),
        ({"sampler": StepSampler(1, 1), "ddp": {"static_graph": True}}, "leave static_graph out"),
    ],
)
def test_global_batch_that_cannot_be_kept(
    model: torch.nn.Module, settings: dict[str, object], message: str
) -> None:
    """Session refuses at its start a configuration that does not work with parts."""
    with pytest.raises(SessionError, match=message):
        session_of(model, keep_global_batch=True, **settings)


def test_steps_without_an_agent(model: torch.nn.Module) -> None:
    """Without an agent each step occurs once, in order."""
    with session_of(model) as session:
        numbers = []
        for step in session.steps(3):
            with step:
                numbers.append(step.number)
    assert numbers == [0, 1, 2]
    assert not dist.is_initialized()


def test_a_step_without_its_block_is_refused(model: torch.nn.Module) -> None:
    """A loop without `with step:` would never end; its second request is an error."""
    with session_of(model) as session:
        steps = session.steps(3)
        with next(steps):
            pass
        next(steps)
        with pytest.raises(SessionError, match="nothing in step 1"):
            next(steps)


def test_a_loop_may_end_before_its_block(model: torch.nn.Module) -> None:
    """A script may leave its loop before `with step:`, and continue in another loop."""
    with session_of(model) as session:
        for _ in session.steps(3):
            break
        for step in session.steps(3):
            with step:
                pass
        assert session.finished == 3


def run_by_hand(folder: Path, *launcher: str) -> None:
    """Run the script without Rekindle's agents."""
    write_faults(folder, [])
    command = [sys.executable, *launcher, str(SCRIPT), str(folder), "--steps", str(STEPS)]
    # With its own store torchrun often hangs at the start, in torch 2.13 with gloo.
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for _ in range(3):  # another process may take the free port that torchrun has chosen
        finished = run_command(command, env={**os.environ, **environment("by-hand"), **own})
        if "EADDRINUSE" not in finished.stderr:
            break
    assert finished.returncode == 0, finished.stderr


def losses(record: Record, rank: int) -> list[float]:
    """Return the losses in the rank's own result."""
    return list(record.result(rank)["losses"].values())


def test_under_torchrun(tmp_path: Path, baseline: Record) -> None:
    """Under torchrun a Session trains the same as under Rekindle, bit by bit."""
    run_by_hand(tmp_path, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}")
    record = Record(tmp_path, STEPS)
    for rank in range(RANKS):
        assert losses(record, rank) == losses(baseline, rank)
        assert record.result(rank)["digest"] == baseline.result(rank)["digest"]


def test_under_plain_python(tmp_path: Path, job: Callable[..., Job]) -> None:
    """A single process without a launcher trains the same as a job of one rank, bit by bit."""
    run_by_hand(tmp_path)
    record = Record(tmp_path, STEPS)
    run = job(processes=1)
    assert run.end().outcome == "succeeded", run.story()
    assert losses(record, 0) == losses(run.record, 0)
    assert record.result(0)["digest"] == run.record.result(0)["digest"]
