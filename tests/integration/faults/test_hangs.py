"""Ranks that live and make no progress: found by what they do, named, and recovered."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from training_jobs.checks import assert_recovered, steps_lost
from training_jobs.injection import Fault
from training_jobs.job import Job, pause_all
from training_jobs.processes import marked_processes
from training_jobs.record import Record
from training_jobs.selection import soak_but

from rekindle import names
from rekindle.recovery import journal
from rekindle.recovery.fault import Kind
from rekindle.recovery.policy import Policy, Strategy

SOON = Policy(hang_timeout_s=2.0, idle_timeout_s=3.0)
HANGS = ("hang", "hang-collective", "hang-data", "stop", "livelock")
HOLD = Fault(0, "forward", 3, do="pause")  # keeps the job in a step while it is told
_DUMP = "Current thread"  # begins one thread's stack in each answer of a rank


@pytest.mark.parametrize("kind", soak_but(HANGS, "hang-collective", "stop"))
def test_a_rank_that_hangs_is_named_and_replaced(
    kind: str, job: Callable[..., Job], baseline: Record
) -> None:
    """Whatever it is that holds it up; all others keep their processes and their state."""
    run = job(HOLD, nodes=2, policy=SOON)
    run.wait_fault(0)
    run.inject(2, kind, step=9)
    run.release(0)
    assert_recovered(run, baseline, replaced={2})
    assert steps_lost(run) == [0]
    (incident,) = run.incidents()
    assert incident.strategy is Strategy.RECOVER_IN_PLACE
    assert (incident.cause.kind, incident.cause.rank) == (Kind.HANG, 2), incident.cause
    assert "rank 3: in a step" in incident.cause.traceback
    if kind != "stop":  # a stopped process says nothing
        assert "torch/injection.py" in incident.cause.traceback


@pytest.mark.parametrize("kind", soak_but(["hang", "hang-collective", "livelock"], "livelock"))
def test_a_script_that_all_reduces_by_hand(
    kind: str, job: Callable[..., Job], baseline_of: Callable[[str], Record]
) -> None:
    """As with DDP."""
    run = job(HOLD, variant="plain", policy=SOON)
    run.wait_fault(0)
    run.inject(1, kind, step=9)
    run.release(0)
    assert_recovered(run, baseline_of("plain"), replaced={1})
    assert [incident.cause.rank for incident in run.incidents()] == [1]


def looks(run: Job, rank: int) -> int:
    """How often a rank has told its agent where it is."""
    path = Path(run.spec.log_directory, "attempt_0", str(rank), names.STACK_FILE)
    return path.read_text().count(_DUMP) if path.exists() else 0


def wait_looks(run: Job) -> None:
    """Wait until all ranks were looked at more than once."""
    run.wait(lambda: min(looks(run, rank) for rank in range(4)) >= 2, "two looks at all ranks")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0, "between", 9, do="compute"),
        Fault(0, "evaluate", 9, do="pause"),
        Fault(0, "keep state", 9, do="pause"),
    ],
    ids=["evaluates on its own", "says that it evaluates", "keeps its state"],
)
def test_what_takes_long_is_no_hang(
    fault: Fault, job: Callable[..., Job], baseline: Record
) -> None:
    """All others wait for a rank; agents look closely, more than once, and let it be."""
    run = job(fault, nodes=2, policy=SOON)
    run.wait_fault(0)
    wait_looks(run)
    run.release(0)
    assert_recovered(run, baseline, replaced=())
    assert not run.incidents()


def test_a_long_compilation_is_no_hang(job: Callable[..., Job], baseline: Record) -> None:
    """A replacement computes for long in its first step, while all others wait in theirs."""
    run = job(HOLD, Fault(1, "forward", 9), Fault(1, "forward", life=2, do="compute"), policy=SOON)
    run.wait_fault(0)
    # Agents have to see a step to know how long it takes, and all nine are soon over.
    run.wait(lambda: run.status().finished == 3, "a look at step 3")
    run.release(0)
    run.wait_fault(2)
    wait_looks(run)
    run.release(2)
    assert_recovered(run, baseline, replaced={1})
    assert [incident.cause.kind for incident in run.incidents()] == [Kind.PROCESS]


def test_a_suspended_machine_is_no_hang(job: Callable[..., Job], baseline: Record) -> None:
    """All processes of the job stand still for longer than any limit, and go on."""
    policy = Policy(hang_timeout_s=8.0)
    run = job(*pause_all(9), policy=policy)
    run.wait_pause(9)
    processes = [psutil.Process(int(line.split(":")[0])) for line in marked_processes(run.mark)]
    for process in processes:
        process.suspend()
    morning = time.monotonic() + 1.5 * policy.hang_timeout_s
    run.wait(lambda: time.monotonic() > morning, "the end of the night")
    for process in processes:
        process.resume()
    run.release_all()
    assert_recovered(run, baseline, replaced=())
    assert not run.incidents()


UNTOUCHED = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
value = torch.ones(1)
for step in range(200):
    if step == 100 and not again and dist.get_rank() == 1:
        time.sleep(10_000)
    dist.all_reduce(value)
    value /= 2
dist.destroy_process_group()
print("well done", flush=True)
"""


def test_a_script_without_a_session(job: Callable[..., Job], tmp_path: Path) -> None:
    """It hangs when none of its processes does anything; all are started anew."""
    script = tmp_path / "untouched.py"
    script.write_text(UNTOUCHED)
    run = job(nodes=2, processes=4, policy=SOON, script=script)
    assert run.end().outcome == "succeeded", run.story()
    (incident,) = run.incidents()
    assert incident.strategy is Strategy.HANG_RESTART
    assert (incident.cause.kind, incident.cause.rank) == (Kind.HANG, 1), incident.cause
    assert "untouched.py" in incident.cause.traceback


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", HANGS)
def test_twenty_hangs_of_each_kind(kind: str, job: Callable[..., Job]) -> None:
    """With the limits that users have: each decided within 15 s, at least 19 of the right rank.

    The time runs from the last record of a rank before it hangs.
    """
    run = job(nodes=2, steps=100_000, policy=Policy(max_recoveries=1000))
    right, seconds = 0, []
    for turn in range(20):
        run.wait_event(journal.FirstStep, count=turn + 1)
        rank = turn % 4
        run.inject(rank, kind)
        seen = run.wait_event(journal.FaultSeen, count=turn + 1)
        right += (seen.fault.kind, seen.fault.rank) == (Kind.HANG, rank)
        records = [line["at"] for line in run.record.lines(rank)]
        seconds.append(seen.at - max(at for at in records if at < seen.at))
    print(f"{kind}: {right} of 20 named, decided after {min(seconds):.1f} to {max(seconds):.1f} s")
    run.wait_event(journal.FirstStep, count=21)
    assert right >= 19
    assert max(seconds) <= 15.0
    assert sum(steps_lost(run)) == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_steps_of_varying_length(job: Callable[..., Job]) -> None:
    """No step is a hang that takes ten times as long as another."""
    run = job(steps=10_000, policy=Policy(), misfit={"SHORTEST_STEP_S": "0.002"})
    assert run.end(3000).outcome == "succeeded", run.story()
    assert not run.incidents()
