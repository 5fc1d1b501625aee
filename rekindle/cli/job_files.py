"""Implement the commands that read the files of jobs: their list, the output of ranks, a report."""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections import deque
from pathlib import Path

import msgspec

from rekindle.cli.jobs import directory_of
from rekindle.cli.terminal_output import clock, table
from rekindle.engines.client import JobClient
from rekindle.errors import RekindleError, UsageError
from rekindle.job.journal_reader import complete_lines, events_in, first_event, is_over, last_event
from rekindle.job.spec import JobDirectory, home
from rekindle.recovery.journal import journal
from rekindle.reporting.event_text import resumed_text
from rekindle.reporting.summary import markdown_report, newest_checkpoint, summarize

ANSWER_S = 2.0  # for the coordinator of a listed job
_POLL_S = 0.2  # between two looks at files that grow
_STREAMS = ("stdout", "stderr")
_DIED = "died"  # no attempt has ended, and no coordinator answers
_DAMAGED = "damaged"


class ListedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of this machine and user.

    state: how the job ended, or its state in `rekindle status`. A job without a coordinator has
    died. A job with an unreadable journal is damaged; it began when its file last changed.
    finished: its steps; -1: not known. began, ended: seconds since the epoch; 0: not yet.
    """

    job_id: str
    state: str
    finished: int
    began: float
    ended: float
    reason: str
    directory: str


def list_jobs(options: argparse.Namespace) -> None:
    """List the jobs of this machine and user, the newest first."""
    folders = (home() / "jobs").glob("*")
    names = fnmatch.filter(sorted(each.name for each in folders), options.pattern)
    found = [_listed(JobDirectory(home() / "jobs" / name)) for name in names]
    rows = [each for each in found if each is not None]
    rows = [each for each in rows if options.state in ("", each.state)]
    rows.sort(key=lambda each: -each.began)
    if options.json:
        print(msgspec.json.encode(rows).decode())
        return
    if not rows:
        print(f"no such job in {home() / 'jobs'}")
        return
    table(
        ("job", "state", "steps", "began", "ended"),
        [
            (
                each.job_id,
                each.state,
                each.finished if each.finished >= 0 else "?",
                clock(each.began),
                clock(each.ended) if each.ended else "-",
            )
            for each in rows
        ],
    )


def _listed(directory: JobDirectory) -> ListedJob | None:
    """Return the row of a job; None: the folder has no job, or its attempt has not begun."""
    name, path = directory.path.name, str(directory.path)
    first, last = first_event(directory.journal_file), last_event(directory.journal_file)
    if first is None:
        return _damaged(directory)
    state, finished, ended, reason = _DIED, -1, 0.0, ""
    if isinstance(last, journal.Ended):
        state, finished, ended, reason = last.outcome, last.finished, last.at, last.reason
    elif (endpoint := directory.endpoint()) is not None:
        try:
            view = JobClient(endpoint, directory.secret()).status(limit_s=ANSWER_S)
            state, finished = view.state, view.finished
        except RekindleError as error:
            reason = str(error)
    return ListedJob(
        job_id=name,
        state=state,
        finished=finished,
        began=first.at,
        ended=ended,
        reason=reason,
        directory=path,
    )


def _damaged(directory: JobDirectory) -> ListedJob | None:
    """Return the row of a journal that has complete lines, but not a first event."""
    path = directory.journal_file
    if not path.exists() or not complete_lines(path):
        return None
    return ListedJob(
        job_id=directory.path.name,
        state=_DAMAGED,
        finished=-1,
        began=path.stat().st_mtime,
        ended=0.0,
        reason=f"the first line of {path} is not an event of this version of Rekindle",
        directory=str(directory.path),
    )


def logs(options: argparse.Namespace) -> None:
    """Print the output of a job's ranks.

    Raises UsageError: the job has no such output on this machine.
    """
    if options.tail is not None and options.tail < 0:
        raise UsageError(f"--tail {options.tail}: give 0 or more")
    directory = directory_of(options.job)
    output = _Output(directory, rank=options.rank, restart=options.restart, stream=options.stream)
    output.print(options.tail)
    while options.follow and not output.is_over:
        time.sleep(_POLL_S)
        output.print()


class _Output:
    """The output files of a job's ranks, of the newest restart unless another one is given."""

    def __init__(
        self, directory: JobDirectory, *, rank: int | None, restart: int | None, stream: str
    ) -> None:
        self._directory = directory
        self._folder = Path(directory.spec().log_directory)
        self._rank = rank
        self._restart = restart
        self._streams = (stream,) if stream else _STREAMS
        self._files: dict[Path, _GrowingFile] = {}
        self.is_over = False

    def print(self, tail: int | None = None) -> None:
        """Print the lines that are new since the last call, at most `tail` of each file."""
        over = is_over(self._directory.journal_file)  # before the look at the last lines
        for path in self._paths():
            if path not in self._files:
                self._files[path] = _GrowingFile(path, tail)
        for path, file in self._files.items():  # an earlier restart may have more lines, too
            for line in file.lines(whole=over):
                print(line if self._rank is not None else f"[rank {path.parent.name}] {line}")
        print(end="", flush=True)
        self.is_over = over

    def _paths(self) -> list[Path]:
        ranks = self._ranks()
        wanted = ranks if self._rank is None else [self._rank]
        if not ranks:
            raise UsageError(
                f"{self._folder} has no output of ranks. The output of ranks in pods is in the "
                "logs of the pods: kubectl logs; that of other machines is on these machines"
            )
        if self._rank is not None and self._rank not in ranks:
            raise UsageError(
                f"{self._of_restart()} has no output of rank {self._rank}, only of "
                f"{', '.join(map(str, ranks))}"
            )
        files = (
            self._of_restart() / str(rank) / f"{stream}.log"
            for rank in wanted
            for stream in self._streams
        )
        return [each for each in files if each.exists()]

    def _ranks(self) -> list[int]:
        return sorted(int(each.name) for each in self._of_restart().glob("[0-9]*"))

    def _of_restart(self) -> Path:
        number = self._restart
        if number is None:
            found = (each.name.rpartition("_")[2] for each in self._folder.glob("attempt_[0-9]*"))
            number = max(map(int, found), default=0)
        return self._folder / f"attempt_{number}"


class _GrowingFile:
    """A text file to which a process appends. tail: of its present lines, only the last ones."""

    def __init__(self, path: Path, tail: int | None) -> None:
        self._path = path
        self._tail = tail
        self._at = 0
        self._rest = b""

    def lines(self, *, whole: bool) -> list[str]:
        """Return the new lines. whole: also the text after the last line end."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            found = deque(file, maxlen=self._tail)
            self._at, self._tail = file.tell(), None
        if found:
            found[0] = self._rest + found[0]
            self._rest = b"" if whole or found[-1].endswith(b"\n") else found.pop()
        elif whole and self._rest:
            found.append(self._rest)
            self._rest = b""
        return [each.decode(errors="replace").rstrip("\n") for each in found]


def report(options: argparse.Namespace) -> None:
    """Print the report of a job, also of one that has not ended."""
    directory = directory_of(options.job)
    history = events_in(directory.journal_file)
    summary = summarize(options.job, history)
    logs = directory.spec().log_directory
    newest = newest_checkpoint(history)
    text = markdown_report(
        summary,
        resumed=resumed_text(history),
        logs=logs,
        checkpoint=f"step {newest.step}, at `{newest.path}`" if newest else "",
    )
    print(text, end="")
