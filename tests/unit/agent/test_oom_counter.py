"""The kernel's count of processes that its OOM killer ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.agent.watchdog import NEAR_S, OomCounter

V2 = "low 0\nhigh 0\nmax 31\noom 1\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def laid_out(root: Path, cgroup: str, file: str, text: str) -> tuple[OomCounter, Path]:
    """Return a counter on a machine with this cgroup file, and the path of the file."""
    proc, mounted = root / "proc", root / "cgroup"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    path = mounted / file
    path.parent.mkdir(parents=True)
    path.write_text(text.format(3))
    return OomCounter(mounted, proc), path


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/pod/container\n", "pod/container/memory.events", V2),
        ("0::/../outside\n", "memory.events", V2),  # seen from within a container
        ("9:name=systemd:/\n4:cpu,memory:/pod\n0::/\n", "memory/pod/memory.oom_control", V1),
        ("4:memory:/not/mounted/here\n", "memory/memory.oom_control", V1),
    ],
)
def test_who_dies_soon_after_the_count_has_risen(
    tmp_path: Path, cgroup: str, file: str, text: str
) -> None:
    """A process that dies soon after the count has risen may be a victim, also a second one.

    This is true in both cgroup versions, and in a container that sees a part of them.
    """
    counter, path = laid_out(tmp_path, cgroup, file, text)
    assert not counter.killed_lately(0.0)  # earlier kills do not count
    path.write_text(text.format(4))
    assert counter.killed_lately(100.0)
    assert counter.killed_lately(100.5)
    assert not counter.killed_lately(100.0 + NEAR_S)


def test_a_kill_of_somebody_else_is_none_of_a_rank(tmp_path: Path) -> None:
    """A kill long before the rank's end, such as of a loader's worker, does not explain the end."""
    counter, path = laid_out(tmp_path, "0::/a\n", "a/memory.events", V2)
    path.write_text(V2.format(4))
    counter.look(10.0)
    assert not counter.killed_lately(30.0)


def test_where_nobody_counts_nothing_is_seen(tmp_path: Path) -> None:
    """Without cgroups, or without the file of a cgroup, the counter reports no kill."""
    assert not OomCounter(tmp_path / "none", tmp_path / "none").killed_lately(0.0)
    counter, path = laid_out(tmp_path, "0::/a\n", "a/memory.events", V2)
    path.unlink()
    assert not counter.killed_lately(0.0)


def test_on_this_machine() -> None:
    """The counter reads the files of this machine, or works without them."""
    assert not OomCounter().killed_lately(0.0)
