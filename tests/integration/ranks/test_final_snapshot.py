"""The final snapshot has the state of exactly the step in its name, or there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import bound_s, join, status_of, wait_asleep, wait_until

from rekindle import names
from rekindle.rank import snapshot_schedule
from rekindle.rank.snapshot_schedule import FinalSnapshot, Moment


class SimulatedRank:
    """A simulated rank: the number of updates that it has started, and its final snapshots."""

    def __init__(self) -> None:
        self.begun = 0
        self.kept: list[tuple[int, bool]] = []
        self.meanwhile: list[object] = []  # one action for each copy of the state
        self.words: FinalSnapshot | None = None

    def keep(self, moment: Moment) -> bool:
        """Copy the state while another action runs; return whether the moment still holds."""
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if not moment.holds():
            return False
        self.kept.append((moment.step, moment.inside))
        return True


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimulatedRank:
    """Return a rank whose final snapshot the test requests directly, without a signal."""
    monkeypatch.setenv(names.ENV_JOB_ID, tmp_path.name)
    made = SimulatedRank()
    made.words = FinalSnapshot(made, made.keep)
    return made


def end_step(rank: SimulatedRank, finished: int) -> None:
    """Do the update of the current step and end the step."""
    rank.begun = finished
    rank.words.end_step(finished)


def test_between_two_steps_the_newest_is_kept(rank: SimulatedRank) -> None:
    """Between two steps the final snapshot has the state after the last step."""
    rank.words.begin_step(3)
    end_step(rank, 4)
    rank.words._keep_newest()
    assert rank.kept == [(4, False)]


def test_inside_a_step_the_one_before_is_kept(rank: SimulatedRank) -> None:
    """Before the update of a step the final snapshot has the state before that step."""
    rank.begun = 3
    rank.words.begin_step(3)
    rank.words._keep_newest()
    assert rank.kept == [(3, True)]


def begin_update(rank: SimulatedRank) -> None:
    """Start the update of the current step."""
    rank.begun = 4


def end_graph(rank: SimulatedRank) -> None:
    """End the graph without an update, as with accumulated gradients.

    Callbacks may change the state afterwards.
    """
    rank.words.end_graph()


@pytest.mark.parametrize("change", [begin_update, end_graph])
def test_what_changes_a_state_is_waited_for(
    rank: SimulatedRank, change: Callable[[SimulatedRank], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an update or callbacks the final snapshot waits for the end of the step."""
    rank.begun = 3
    rank.words.begin_step(3)
    change(rank)
    monkeypatch.setattr(snapshot_schedule, "LIMIT_S", 2 * bound_s())
    looks: list[Moment] = []
    monkeypatch.setattr(
        snapshot_schedule, "Moment", lambda *of: looks.append(Moment(*of)) or looks[-1]
    )
    saying = threading.Thread(target=rank.words._keep_newest)
    saying.start()
    wait_until(lambda: len(looks) > 5, "looks at a state that changes")
    assert (saying.is_alive(), rank.kept) == (True, [])
    rank.words.end_step(4)
    join(saying)
    assert rank.kept == [(4, False)]


def test_a_copy_during_which_the_update_began_does_not_count(rank: SimulatedRank) -> None:
    """If an update starts during a copy, the copy is dropped and repeated after the step."""
    rank.begun = 3
    rank.words.begin_step(3)
    rank.meanwhile = [lambda: end_step(rank, 4)]
    rank.words._keep_newest()
    assert rank.kept == [(4, False)]


def test_no_step_begins_once_the_process_has_to_end(rank: SimulatedRank) -> None:
    """After the signal no step starts, so that the state does not change during the copy."""
    end_step(rank, 4)
    rank.words._ending.set()
    begins = threading.Thread(target=rank.words.begin_step, args=(4,), daemon=True)
    begins.start()
    wait_asleep(begins)
    assert begins.is_alive()
    rank.words._keep_newest()
    assert rank.kept == [(4, False)]


def test_one_rank_of_a_node_is_enough(rank: SimulatedRank) -> None:
    """One rank of a node takes the final snapshot; the others have the same state and skip it."""
    end_step(rank, 4)
    other = SimulatedRank()
    other.words = FinalSnapshot(other, other.keep)
    end_step(other, 4)
    rank.meanwhile = [other.words._keep_newest]
    rank.words._keep_newest()
    assert (rank.kept, other.kept) == ([(4, False)], [])


SCRIPT = """
import os, signal, sys, time
from rekindle.rank.snapshot_schedule import FinalSnapshot

class Updates:
    begun = 3

def keep(moment):
    os.write(1, b"kept %d\\n" % moment.step)  # print() fails in a handler that interrupts print()
    return True

words = FinalSnapshot(Updates(), keep)
words.listen()
words.begin_step(3)
{more}
up, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"x")
    time.sleep(60)
    os._exit(0)
os.read(up, 1)
os.kill(child, signal.SIGTERM)
print("child ended by", os.waitpid(child, 0)[1], flush=True)
print("ready", flush=True)
time.sleep(100)
"""
OWN = """
def own(*_):
    os.write(1, b"own handler\\n")
    sys.exit(7)
signal.signal(signal.SIGTERM, own)
"""


@pytest.mark.parametrize(
    ("more", "text", "status"), [("", "kept 3", -signal.SIGTERM), (OWN, "own handler", 7)]
)
def test_the_signal_ends_the_process(more: str, text: str, status: int, tmp_path: Path) -> None:
    """SIGTERM ends the process after the final snapshot, with the signal's status.

    A handler that the script sets later stays in effect. SIGTERM ends forked children as usual.
    """
    script = textwrap.dedent(SCRIPT).format(more=textwrap.dedent(more))
    environment = os.environ | {names.ENV_JOB_ID: tmp_path.name}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        lines = []
        while "ready" not in lines:
            lines.append(process.stdout.readline().strip())
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read().split("\n")
        assert status_of(process) == status
    forked = OWN not in more  # forked processes inherit the script's own handler
    assert (f"child ended by {int(signal.SIGTERM)}" in lines) is forked
    assert text in rest
