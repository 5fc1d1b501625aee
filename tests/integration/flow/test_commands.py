"""A user's command as a step of a flow: it ends with the flow's process, and runs only once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from prefect_side import until
from waiting import bound_s

from rekindle.errors import JobError, UsageError
from rekindle.tasks.retraining import measure, run_command

# Starts a child that runs longer, and writes the numbers of both processes.
COMMAND = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
FLOW = """
import sys
from pathlib import Path
from rekindle.tasks.retraining import run_command
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
folder = Path(sys.argv[3])
def stop(*_): raise KeyboardInterrupt
import signal; signal.signal(signal.SIGTERM, stop)
run_command(command, folder=folder, environment={}, lock=folder / "lock", log=print)
"""


def run(folder: Path, *command: str, log_lines: list[str] | None = None) -> str:
    """Run a command; its log lines go to `log_lines`."""
    lines = [] if log_lines is None else log_lines
    return run_command(
        command,
        folder=folder,
        environment={},
        lock=folder / "lock",
        log=lambda text, *values: lines.append(text % values),
    )


def test_its_last_line_is_what_it_tells(tmp_path: Path) -> None:
    """The result is the last line of stdout that is not empty; the log has both streams.

    The log shows the newest text of a progress bar.
    """
    messages: list[str] = []
    script = "import sys; print('one'); print(); print('9 %\\r99 %', file=sys.stderr)"
    assert run(tmp_path, sys.executable, "-c", script, log_lines=messages) == "one"
    assert sorted(messages) == ["", "99 %", "one"]


def test_one_that_fails_or_does_not_begin(tmp_path: Path) -> None:
    """The error has the status and the last line, or the reason that the command cannot start."""
    with pytest.raises(JobError, match="ended with status 3: no data"):
        run(tmp_path, "sh", "-c", "echo no data >&2; exit 3")
    with pytest.raises(UsageError, match="cannot start the command 'not-there'"):
        run(tmp_path, "not-there")


@pytest.mark.parametrize(
    ("script", "loss"),
    [
        ("echo '{\"loss\": 1}'; echo a warning at exit >&2", 1),
        ("echo '{\"loss\": 2}' > metrics.json; echo done", 2),
        ("echo '{\"loss\": 3}' > $REKINDLE_METRICS; echo '{\"loss\": 2}' > metrics.json", 3),
        ("printf '{\"loss\": 4}'; printf '\\r99 %%' >&2", 4),
    ],
)
def test_the_metrics_of_an_evaluation(tmp_path: Path, script: str, loss: int) -> None:
    """A file that the evaluation writes has its metrics, or else the last line of its stdout.

    Standard error does not count, and neither does a file of an earlier evaluation.
    """
    (tmp_path / "metrics.json").write_text('{"loss": 0}')
    found = measure(
        ["sh", "-c", script],
        folder=tmp_path,
        checkpoint="none",
        lock=tmp_path / "lock",
        log=lambda *_: None,
    )
    assert found == {"loss": loss}


def begin(folder: Path) -> tuple[psutil.Popen, list[psutil.Process]]:
    """Run the command in a flow's process; return that process, the command and its child."""
    pids = folder / "pids"
    process = psutil.Popen([sys.executable, "-c", FLOW, COMMAND, str(pids), str(folder)])
    found = until(lambda: pids.exists() and len(pids.read_text().split()) == 2, "it runs")
    assert found
    return process, [psutil.Process(int(pid)) for pid in pids.read_text().split()]


def test_it_ends_with_a_flow_that_is_asked_to_end(tmp_path: Path) -> None:
    """If a flow gets SIGTERM, the command and its child end."""
    flow, doomed = begin(tmp_path)
    flow.terminate()
    assert flow.wait(bound_s())
    _, alive = psutil.wait_procs(doomed, bound_s())
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_what_a_killed_flow_has_left_is_ended(tmp_path: Path) -> None:
    """The kernel ends the command of a killed flow; the next run ends the child first.

    Otherwise the child could write the same files as the next run.
    """
    flow, (command, child) = begin(tmp_path)
    flow.kill()
    flow.wait(bound_s())
    psutil.wait_procs([command], bound_s())
    assert child.is_running()
    assert run(tmp_path, "echo", "done") == "done"
    psutil.wait_procs([child], bound_s())
    assert not child.is_running()


def test_two_at_once(tmp_path: Path) -> None:
    """A second run of the same command waits for the first, with a message."""
    flow, (command, _) = begin(tmp_path)
    messages: list[str] = []
    with ThreadPoolExecutor() as pool:
        second = pool.submit(run, tmp_path, "echo", "done", log_lines=messages)
        until(lambda: messages, "the second one waits")
        assert "does this already" in messages[0]
        assert command.is_running()
        flow.terminate()
        assert second.result(bound_s()) == "done"
    flow.wait(bound_s())
