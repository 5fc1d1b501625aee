"""The agent reads the records of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.agent.node_state import NodeState
from rekindle.agent.profiling_files import ProfilingReader
from rekindle.profiling.files import Follower
from rekindle.profiling.markers import DEFAULT, Encoder, Range
from rekindle.profiling.switch import ProfilingOrder, Switch, switched
from rekindle.protocol.agent import Profile

ON = Profile(switch=switched(Switch(), ProfilingOrder(on=True).kinds, on=True), since=5)
OFF = Profile()


def lines(first: int, end: int, seconds: float = 0.1) -> bytes:
    encoder = Encoder(1, 0)
    ns = int(seconds * 1e9)
    made = (Range(f"step {n}", DEFAULT, n * ns, (n + 1) * ns) for n in range(first, end))
    return b"".join(encoder.lines(each, 1) for each in made)


class Node:
    """A node with two ranks of this world."""

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        self.folder = folder
        self.state = NodeState(processes=2, profile=ON)
        self.reader = ProfilingReader(folder, {}, self.state, world_size)

    def write(self, rank: int, data: bytes, name: str = "100") -> None:
        folder = self.folder / "default_task_id_5" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("ab") as file:
            file.write(data)

    def new_steps(self) -> dict[int, list[int]]:
        news = self.reader.read()
        return {r: [t.step for t in each] for r, each in news.steps.items()} if news else {}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_only_what_is_new_is_told(node: Node) -> None:
    """The agent reports only records that are new since its start and its last report."""
    node.write(0, lines(0, 5))
    assert node.new_steps() == {}
    node.write(0, lines(5, 7))
    node.write(1, lines(0, 2))
    assert node.new_steps() == {0: [5, 6], 1: [0, 1]}
    assert node.new_steps() == {}


def test_half_a_line_waits_for_its_other_half(node: Node) -> None:
    node.new_steps()
    data = lines(0, 2)
    node.write(0, data[:-30])
    assert node.new_steps() == {0: [0]}
    node.write(0, data[-30:])
    assert node.new_steps() == {0: [1]}


def test_another_file_is_followed(node: Node) -> None:
    """The agent reads the next file of a rank, and ignores names that are not numbers.

    A rank starts a new file after 10 MB.
    """
    node.new_steps()
    node.write(0, lines(0, 2))
    node.write(0, lines(2, 4), name="101")
    node.write(0, lines(4, 6), name="notes")
    assert node.new_steps() == {0: [0, 1, 2, 3]}
    node.write(0, lines(6, 7), name="101")
    assert node.new_steps() == {0: [6]}


def test_nothing_is_told_while_it_is_off(node: Node) -> None:
    node.new_steps()
    node.state.profile = OFF
    node.write(0, lines(0, 2))
    assert node.new_steps() == {}
    node.state.profile = ON
    assert node.new_steps() == {}
    node.write(0, lines(2, 3))
    assert node.new_steps() == {0: [2]}


def test_of_very_many_steps_all_ranks_tell_of_the_same(tmp_path: Path) -> None:
    """With 1,000 ranks and steps of 2 ms, a rank reports every 128th step.

    Ranks whose steps have other lengths report some of the same steps.
    """
    node = Node(tmp_path, world_size=1000)
    node.new_steps()
    node.write(0, lines(0, 1000, 0.002))
    node.write(1, lines(0, 1000, 0.0019))
    steps = node.new_steps()
    assert steps[0] == list(range(0, 1000, 128))
    assert set(steps[0]) & set(steps[1])


def test_a_file_that_ages_meanwhile(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    (tmp_path / "1").write_bytes(b"one\n")
    assert follower.lines() == [b"one"]
    (tmp_path / "1").unlink()
    (tmp_path / "2").write_bytes(b"two\n")
    assert follower.lines() == [b"two"]
