"""Final checkpoint: the state of exactly the step that is named, or none."""

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


class Pretended:
    """A rank: how many updates it has begun, and what it has kept."""

    def __init__(self) -> None:
        self.begun = 0
        self.kept: list[tuple[int, bool]] = []
        self.meanwhile: list[object] = []  # what happens while a state is copied, one by one
        self.words: FinalSnapshot | None = None

    def keep(self, moment: Moment) -> bool:
        """Copy, while something else happens, and look whether it is still that state."""
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if not moment.holds():
            return False
        self.kept.append((moment.step, moment.inside))
        return True


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretended:
    """A rank whose the final checkpoint is asked for by the test itself, not by a signal."""
    monkeypatch.setenv(names.ENV_JOB_ID, tmp_path.name)
    made = Pretended()
    made.words = FinalSnapshot(made, made.keep)
    return made


def end_step(rank: Pretended, finished: int) -> None:
    """The step under way updates, and ends."""
    rank.begun = finished
    rank.words.end_step(finished)


def test_between_two_steps_the_newest_is_kept(rank: Pretended) -> None:
    """It is that of the last step."""
    rank.words.begin_step(3)
    end_step(rank, 4)
    rank.words._say()
    assert rank.kept == [(4, False)]


def test_inside_a_step_the_one_before_is_kept(rank: Pretended) -> None:
    """As long as its update has not begun: that of a step in which nobody goes on."""
    rank.begun = 3
    rank.words.begin_step(3)
    rank.words._say()
    assert rank.kept == [(3, True)]


def begin_update(rank: Pretended) -> None:
    """The update of the step under way."""
    rank.begun = 4


def end_graph(rank: Pretended) -> None:
    """Without an update, as of accumulated gradients: callbacks may change the state now."""
    rank.words.end_graph()


@pytest.mark.parametrize("change", [begin_update, end_graph])
def test_what_changes_a_state_is_waited_for(
    rank: Pretended, change: Callable[[Pretended], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is of no step until it ends."""
    rank.begun = 3
    rank.words.begin_step(3)
    change(rank)
    monkeypatch.setattr(snapshot_schedule, "LIMIT_S", 2 * bound_s())
    looks: list[Moment] = []
    monkeypatch.setattr(
        snapshot_schedule, "Moment", lambda *of: looks.append(Moment(*of)) or looks[-1]
    )
    saying = threading.Thread(target=rank.words._say)
    saying.start()
    wait_until(lambda: len(looks) > 5, "looks at a state that changes")
    assert (saying.is_alive(), rank.kept) == (True, [])
    rank.words.end_step(4)
    join(saying)
    assert rank.kept == [(4, False)]


def test_a_copy_during_which_the_update_began_does_not_count(rank: Pretended) -> None:
    """It would be named by one step and be of another, or of both."""
    rank.begun = 3
    rank.words.begin_step(3)
    rank.meanwhile = [lambda: end_step(rank, 4)]
    rank.words._say()
    assert rank.kept == [(4, False)]


def test_no_step_begins_once_the_process_has_to_end(rank: Pretended) -> None:
    """Whatever is copied between two steps stays as it is."""
    end_step(rank, 4)
    rank.words._ending.set()
    begins = threading.Thread(target=rank.words.begin_step, args=(4,), daemon=True)
    begins.start()
    wait_asleep(begins)
    assert begins.is_alive()
    rank.words._say()
    assert rank.kept == [(4, False)]


def test_one_rank_of_a_node_is_enough(rank: Pretended) -> None:
    """All have the same state; whoever comes second leaves it to the first."""
    end_step(rank, 4)
    other = Pretended()
    other.words = FinalSnapshot(other, other.keep)
    end_step(other, 4)
    rank.meanwhile = [other.words._say]
    rank.words._say()
    assert (rank.kept, other.kept) == ([(4, False)], [])


SCRIPT = """
import os, signal, sys, time
from rekindle.rank.snapshot_schedule import FinalSnapshot

class Updates:
    begun = 3

def keep(moment):
    print("kept", moment.step, flush=True)
    return True

words = FinalSnapshot(Updates(), keep)
words.listen()
words.begin_step(3)
{more}
up, told = os.pipe()
child = os.fork()
if child == 0:
    os.write(told, b"x")
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
    print("own handler", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, own)
"""


@pytest.mark.parametrize(
    ("more", "said", "status"), [("", "kept 3", -signal.SIGTERM), (OWN, "own handler", 7)]
)
def test_the_signal_ends_the_process(more: str, said: str, status: int, tmp_path: Path) -> None:
    """After the final snapshot, as without one. A handler that came later is left alone.

    Processes that it has forked end by the signal as ever.
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
    forked = OWN not in more  # whoever takes the signal over has it in forked processes, too
    assert (f"child ended by {int(signal.SIGTERM)}" in lines) is forked
    assert said in rest
