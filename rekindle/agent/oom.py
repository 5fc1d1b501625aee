"""Whether the kernel has killed for want of memory: its own count, of this process's cgroup.

A rank that the out-of-memory killer ends dies of SIGKILL like any other, and says nothing. So it is
noted when the count has risen: who dies of SIGKILL then was killed for want of memory, and a helper
of a rank that was killed so before says nothing about the rank.
"""

from __future__ import annotations

from pathlib import Path

from rekindle.agent.memory_limits import memory_cgroups

_FILES = "memory.events", "memory.oom_control"  # of cgroup v2, and of v1
_COUNT = "oom_kill"  # of a line, in both files; kills by any out-of-memory killer are counted

NEAR_S = 2.0  # between a kill and the end of the process, which gives its memory back first


class OomCounter:
    """Counts kills in the cgroup of this process; ranks are in the same one, unless they move.

    root: where the file systems of cgroups are mounted.
    """

    def __init__(
        self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self")
    ) -> None:
        own = memory_cgroups(root, proc)[:1]  # those above count strangers, too
        files = (folder / name for folder in own for name in _FILES)
        self._file = next((file for file in files if file.exists()), None)
        self._seen = self._read()
        self._risen_at = -NEAR_S

    def look(self, now: float) -> None:
        """Note whether the kernel has killed since the last time; to be called often."""
        before, self._seen = self._seen, self._read()
        if self._seen > before:
            self._risen_at = now

    def killed_lately(self, now: float) -> bool:
        """Whether whoever dies now of SIGKILL may have been killed for want of memory."""
        self.look(now)
        return now - self._risen_at < NEAR_S

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:  # a kernel without the controller; then nobody can tell
            return 0
        counts = (line.split() for line in lines)
        return next((int(words[1]) for words in counts if words[:1] == [_COUNT]), 0)
