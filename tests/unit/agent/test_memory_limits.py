"""The memory that a process can still take: of the machine, and of each cgroup."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rekindle.agent import memory_limits as memory
from rekindle.agent.memory_limits import available_bytes

GB = 1 << 30
V2 = {"memory.max": 9 * GB, "memory.current": 5 * GB}
V1 = {"memory.limit_in_bytes": 9 * GB, "memory.usage_in_bytes": 5 * GB}
NO_LIMIT = {"memory.max": "max", "memory.current": 5 * GB}
STAT = f"anon {3 * GB}\nshmem {GB}\nactive_file {GB}\ninactive_file {GB}"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with 64 GB of free memory."""

    class Machine:
        available = 64 * GB

    monkeypatch.setattr(psutil, "virtual_memory", Machine)


def left(root: Path, cgroup: str, files: dict[str, dict[str, object]]) -> int:
    """Return the whole GB that a process in these cgroups can still take."""
    (root / "proc").mkdir()
    (root / "proc" / "cgroup").write_text(cgroup)
    (root / "cgroup").mkdir()
    for folder, texts in files.items():
        place = root / "cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (place / name).write_text(f"{text}\n")
    return available_bytes(root / "cgroup", root / "proc") // GB


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/pod/container\n", {"pod/container": V2}, 4),
        ("0::/pod/container\n", {"pod/container": V2 | {"memory.stat": STAT}}, 6),
        ("0::/pod/container\n", {"pod/container": NO_LIMIT}, 64),
        ("0::/pod/container\n", {"pod/container": NO_LIMIT, "pod": V2}, 4),
        ("0::/../outside\n", {".": V2}, 4),  # seen from within a container
        ("9:name=systemd:/\n4:cpu,memory:/pod\n0::/\n", {"memory/pod": V1}, 4),
        (
            "4:memory:/pod\n",
            {"memory/pod": V1 | {"memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}"}},
            5,
        ),
        ("4:memory:/not/mounted/here\n", {"memory": V1}, 4),
        ("4:memory:/pod\n", {"memory/pod": {"memory.limit_in_bytes": (1 << 63) - 4096}}, 64),
        ("0::/\n", {}, 64),
        ("", {}, 64),
    ],
)
def test_the_least_of_all_limits(
    tmp_path: Path, cgroup: str, files: dict[str, dict[str, object]], expected: int
) -> None:
    """The least limit applies, in both cgroup versions. Cached files are free memory.

    Shared memory is not.
    """
    assert left(tmp_path, cgroup, files) == expected


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    """Without cgroups, the machine's free memory applies."""
    assert available_bytes(tmp_path / "none", tmp_path / "none") == 64 * GB


def test_this_machine() -> None:
    """The function can read the files of this machine."""
    assert memory.available_bytes() > 0
