"""Keep the files that the start-up code of a script destroys when a new process runs it again.

A process that replaces a rank runs the script from its first line: code that empties a folder or
opens a log with mode "w" would destroy what the run has written. Until the Session exists, such a
file or folder gets another name before the script's own call continues, and a line reports it. A
file that the script writes again with the same content is no loss, and the copy goes.

The process does not end with an error instead: it begins in the middle of a recovery, and code that
writes its settings again at each start is harmless.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rekindle import names
from rekindle.console import say
from rekindle.rank import environment
from rekindle.rank.error_origin import is_of_library

_watcher: EarlierFiles | None = None  # of this process
_FILE_CLOCK = 5  # CLOCK_REALTIME_COARSE: the kernel takes the times of files from it
_FOLDER = ".rekindle-earlier"
_SMALL_BYTES = 1 << 20  # a comparison of such a file takes a millisecond
_REMEDY = (
    f'Put such code below `if os.environ.get("{names.ENV_FIRST_START}", "1") == "1":`, or append '
    "to the file"
)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file or folder that the script destroys, and its place in the script.

    now: its present name; None: it is lost, because of `error`.
    """

    path: Path
    verb: str
    where: str
    now: Path | None
    error: str = ""

    def is_written_again(self) -> bool:
        """Return whether the script has written the same content."""
        if self.now is None or not self.now.is_file() or not self.path.is_file():
            return False
        small = self.now.stat().st_size <= _SMALL_BYTES
        return small and filecmp.cmp(self.now, self.path, shallow=False)

    def text(self) -> str:
        """Return the sentence that reports it."""
        fate = f"its content is now in {self.now}" if self.now else f"it is lost ({self.error})"
        return (
            f"{self.where} {self.verb} {self.path}, which is older than this process: a new "
            f"process runs the script from its beginning, and {fate}. {_REMEDY}"
        )


class EarlierFiles:
    """Watches the destructive calls of this process. Python cannot remove an audit hook.

    report: prints a line.
    """

    def __init__(self, report: Callable[[str], None] = say) -> None:
        self.watches = True
        self._report = report
        self._pid = os.getpid()
        self._began = time.clock_gettime(_FILE_CLOCK)
        self._folder = Path.cwd()
        self._temporary = tuple(map(os.path.realpath, (tempfile.gettempdir(), "/tmp", "/dev")))
        self._kept: list[_Kept] = []

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Handle an audit event: a call is about to run."""
        if not self.watches or event not in _DESTROYED:
            return
        verb, what = _DESTROYED[event]
        path = what(*args)
        if path is not None and os.getpid() == self._pid:
            frame = _of_script(sys._getframe(1))
            if frame is not None and self._is_earlier(path):
                self._keep(path, verb, f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def end(self) -> None:
        """Stop, and report what was kept: the script has reached its Session, or ends."""
        self.watches = False
        kept, self._kept = self._kept, []
        for each in kept:
            with contextlib.suppress(OSError):
                if each.is_written_again() and each.now is not None:
                    each.now.unlink()
                    if not any(each.now.parent.iterdir()):
                        each.now.parent.rmdir()
                    continue
            self._report(each.text())

    def _is_earlier(self, path: Path) -> bool:
        """Return whether a regular file or folder with content is older than this process."""
        inside = path.is_relative_to(self._folder)
        if not inside and any(path.is_relative_to(each) for each in self._temporary):
            return False
        if any(part.startswith(".") for part in path.parts):
            return False  # caches of tools
        try:
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode):
                with os.scandir(path) as entries:
                    return any(self._is_old(each.stat(follow_symlinks=False)) for each in entries)
            return stat.S_ISREG(found.st_mode) and found.st_size > 0 and self._is_old(found)
        except OSError:
            return False  # the call itself will fail

    def _is_old(self, found: os.stat_result) -> bool:
        return found.st_mtime < self._began

    def _keep(self, path: Path, verb: str, where: str) -> None:
        """Move the file or folder away, and make an empty one with the old name.

        A script that lists the folder, such as a dataset of many files, must not find it there.
        """
        mode = stat.S_IMODE(path.lstat().st_mode)
        try:
            inside = path.is_relative_to(self._folder)
            near = inside and self._folder.stat().st_dev == path.lstat().st_dev
            folder = (self._folder if near else path.parent) / _FOLDER
            folder.mkdir(exist_ok=True)
            others = (folder / f"{path.name}.before-{n}" for n in itertools.count(1))
            now = next(other for other in others if not other.exists())
            is_folder = path.is_dir()
            path.rename(now)
            if is_folder:
                path.mkdir(mode)
            else:
                path.touch(mode)
        except FileNotFoundError:
            return  # another rank has been faster
        except OSError as error:
            self._kept.append(_Kept(path, verb, where, None, str(error)))
            return
        self._kept.append(_Kept(path, verb, where, now))


def _opened(path: Any, _mode: Any, flags: int) -> Path | None:
    return _path(path, follows=True) if flags & os.O_TRUNC else None


def _removed(path: Any, folder: int = -1) -> Path | None:
    return _path(path) if folder in (-1, None) else None


def _truncated(path: Any, length: int) -> Path | None:
    return _path(path, follows=True) if length == 0 else None


def _path(path: Any, *, follows: bool = False) -> Path | None:
    if not isinstance(path, str | bytes | os.PathLike):
        return None  # an open descriptor
    name = Path(os.fsdecode(path)).absolute()
    return name.resolve() if follows else name


# By the name of the audit event: what the call does, and to which path.
_DESTROYED: dict[str, tuple[str, Callable[..., Path | None]]] = {
    "open": ("empties", _opened),
    "os.truncate": ("empties", _truncated),
    "os.remove": ("removes", _removed),
    "shutil.rmtree": ("removes", _removed),
}


def _of_script(frame: FrameType | None) -> FrameType | None:
    """Return the script's frame that leads to a call; None: the script names no Rekindle.

    A script without a Session restarts as under torchrun, and its files are its own matter.
    """
    found = None
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if not is_of_library(module, code.co_filename):
            found = found or frame
            with contextlib.suppress(OSError):
                if b"rekindle" in Path(code.co_filename).read_bytes():
                    return found
        frame = frame.f_back
    return None


def watch() -> None:
    """Watch this process until end(), if it is not the first one of its rank in the job."""
    global _watcher
    if not environment.is_first_start():
        _watcher = EarlierFiles()
        sys.addaudithook(_watcher.on_event)


def end() -> None:
    """Stop watching, and report what was kept."""
    if _watcher is not None:
        _watcher.end()
