"""The page docs/start/first-recovery.md with each of its commands and outputs.

The test compares the output with the page, without numbers, times and names. It does not run steps
1 (installation) and 8 (a browser).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documented_blocks import Shown, argument, console_of, program_of, sections, shape
from prefect_side import ending_jobs, until
from repository import ROOT
from waiting import run_command, status_of, wait_until

_PAGE_FOLDER = "/tmp/first"
_PAUSE = "                time.sleep(0.1)"
_INCIDENT = re.compile(r"incident \S+: ")
_LOOK_S = 0.1  # between two runs of a command


class Reader:
    """A user with a folder, who runs commands and compares outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "REKINDLE_HOME": str(folder / "home"),
            "REKINDLE_LOG_FORMAT": "short",  # as in the reader's terminal
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # the package under test
        }

    def shapes(self, text: str) -> list[str]:
        """Return the lines of an output as the page would show them."""
        return [shape(line) for line in text.replace(str(self.folder), _PAGE_FOLDER).splitlines()]

    def ask(self, command: str) -> str:
        """Run a command to its end; return its output."""
        both = ["bash", "-c", f"exec 2>&1; {command}"]
        return str(run_command(both, env=self.environment, cwd=self.folder).stdout)

    def see(self, command: str, lines: list[str]) -> str:
        """Run a command until it prints these lines; return its output."""
        wanted = [shape(line) for line in lines]
        output = ""

        def prints() -> bool:
            nonlocal output
            output = self.ask(command)
            return self.shapes(output) == wanted

        try:
            wait_until(prints, command, pause_s=_LOOK_S)
        except AssertionError as late:
            raise AssertionError(f"$ {command}\n{output}\nbut the page has\n{wanted}") from late
        return output


class Terminal:
    """A command that runs in a terminal of a reader."""

    def __init__(self, reader: Reader, command: str, **environment: str) -> None:
        self._reader, self._seen = reader, 0
        self._log = reader.folder / "terminal"
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                env=reader.environment | environment,
                cwd=reader.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def shows(self, lines: list[str]) -> None:
        """Wait until the terminal shows these lines in this order; others may be between them.

        A stop right after a snapshot loses no step, and the next start is then no incident.
        """
        for line in lines:
            wanted = _INCIDENT.sub("", shape(line))

            def arrives(wanted: str = wanted) -> bool:
                shown = self._reader.shapes(self.text)[self._seen :]
                found = [_INCIDENT.sub("", each) for each in shown]
                if wanted not in found:
                    return False
                self._seen += found.index(wanted) + 1
                return True

            try:
                until(arrives, line)
            except AssertionError as late:
                raise AssertionError(f"{self.text}\ndoes not show\n{line}") from late

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with ending_jobs(tmp_path / "home"):
        yield Reader(tmp_path)


@pytest.fixture
def terminal(reader: Reader) -> Iterator[Callable[..., Terminal]]:
    """Open a terminal with a command."""
    opened: list[Terminal] = []

    def open_with(command: str, **environment: str) -> Terminal:
        opened.append(Terminal(reader, command, **environment))
        return opened[-1]

    yield open_with
    for each in opened:
        each.close()


def kill_rank_1(reader: Reader, shown: list[Shown], job: Callable[[str], str]) -> None:
    """Follow a block with `rekindle status`, `kill` and a command that shows the recovery."""
    status, kill, *after = shown
    pids = [row.split()[2] for row in status.lines if row.startswith("1 ")]
    assert pids == [argument(kill.command, 2)], "the page kills rank 1"
    table = reader.see(job(status.command), status.lines)
    [pid] = [row.split()[2] for row in table.splitlines() if row.startswith("1 ")]
    os.kill(int(pid), signal.SIGKILL)
    for each in after:
        reader.see(job(each.command), each.lines)


def test_the_walk(reader: Reader, terminal: Callable[..., Terminal], prefect_api: str) -> None:
    """Steps 2 to 7 of the page give its output: kill a rank, stop, resume, the same in a flow."""
    _, script, run, kill, incident, stop, flow, *_ = sections(
        ROOT / "docs" / "start" / "first-recovery.md"
    )
    train = reader.folder / "train.py"
    text = program_of(script)
    assert _PAUSE in text
    train.write_text(text)

    [[started]] = console_of(run)
    first = terminal(started.command)
    first.shows(started.lines)
    commands, [shown], _ = console_of(kill)  # the last one injects a fault
    kill_rank_1(reader, commands, str)
    first.shows(shown.lines)
    [incidents], [undisturbed, compare] = console_of(incident)
    reader.see(incidents.command, incidents.lines)

    [shown], [again, status] = console_of(stop)
    first.process.send_signal(signal.SIGINT)
    first.shows(shown.lines)
    assert status_of(first.process) == 130
    train.write_text(text.replace(_PAUSE, ""))
    resumed = terminal(again.command)
    resumed.shows(again.lines)
    assert status_of(resumed.process) == 0
    reader.see(status.command, status.lines)
    (reader.folder / "compare.py").write_text(program_of(incident))
    reader.ask(undisturbed.command)
    assert reader.ask(compare.command).splitlines() == compare.lines

    train.write_text(text)
    (reader.folder / "flow.py").write_text(program_of(flow))
    _, [_, launched], commands, [shown], [end, status] = console_of(flow)
    run_of_flow = terminal(launched.command, PREFECT_API_URL=prefect_api)
    run_of_flow.shows(launched.lines)
    found = re.search(r"second-[0-9a-f]{12}", run_of_flow.text)
    assert found

    def job(command: str) -> str:
        return re.sub(r"second-[0-9a-f]{12}", found[0], command)

    kill_rank_1(reader, commands, job)
    run_of_flow.shows(shown.lines)
    run_of_flow.process.send_signal(signal.SIGINT)
    status_of(run_of_flow.process)
    reader.ask(job(end.command))
    reader.see(job(status.command), status.lines)
