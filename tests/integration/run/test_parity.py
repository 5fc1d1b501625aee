"""A script for torchrun gets the same environment under `rekindle run`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Place, Run
from waiting import run_command

from rekindle import names
from rekindle.cli.local_options import RUN
from rekindle.cli.options import add

TELL = """
import json, os, sys, threading
from pathlib import Path

described = {
    "environment": dict(os.environ), "arguments": sys.argv[1:], "program": Path(sys.argv[0]).name,
    "first path": sys.path[0], "file": __file__, "name": __name__, "folder": os.getcwd(),
    "main": sys.modules["__main__"].__dict__ is globals(), "threads": threading.active_count(),
    "input": os.readlink("/proc/self/fd/0"),
}
Path(os.environ["TELL_IN"], os.environ["RANK"]).write_text(json.dumps(described))
"""

# Values that cannot be equal: ports, ids, and files of the launcher.
OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TELL_IN", "_"}
# For torchrun's launcher only; ranks do not use it.
LAUNCHERS = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}

# Trains across all ranks; then each rank ends successfully in another way.
TRAINS = """
import atexit, os, sys, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
own = torch.tensor([float(rank)])
dist.all_reduce(own)
node = os.environ["GROUP_RANK"]
print("sum", own.item(), "of", dist.get_world_size(), "node", node, sys.argv[1:], os.getcwd())
dist.destroy_process_group()
if rank == 0:
    atexit.register(print, "late handler")
    sys.exit()
if rank == 1:
    sys.exit(256)
if rank == 2:
    print("unfinished line", end="")
if rank == 3:
    threading.Thread(target=lambda: (time.sleep(0.3), print("late thread"))).start()
"""


def torchrun(place: Place, folder: Path, *command: str) -> None:
    """Run a script under the real torchrun."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command]
    environment = place.environment({"TELL_IN": str(folder)})
    subprocess.run(program, cwd=place.folder, env=environment, capture_output=True, check=True)


def told_under_both(place: Place, *command: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the facts that each rank of a script records, under torchrun and under rekindle."""
    theirs, ours = place.folder / "theirs", place.folder / "ours"
    theirs.mkdir()
    ours.mkdir()
    run = place.start(
        *("--nproc-per-node", "2", "--max-restarts", "3", *command),
        env=place.environment({"TELL_IN": str(ours)}),
    )
    torchrun(place, theirs, "--max-restarts", "3", *command)
    run.end(0)
    folders = (theirs, ours)
    by_rank = [[json.loads((folder / rank).read_text()) for folder in folders] for rank in "01"]
    return [(a, b) for a, b in by_rank]


def assert_same_environment(theirs: dict[str, str], ours: dict[str, str]) -> None:
    """Check that each variable of torchrun has its value; others are Rekindle's, or ModelArts'."""
    for name in theirs.keys() - OWN - LAUNCHERS:
        if name != "MASTER_ADDR":
            assert ours.get(name) == theirs[name], name
    more = {name for name in ours.keys() - theirs.keys() if not name.startswith("REKINDLE_")}
    # torchrun passes the first one as an option: python -u
    assert more <= {"PYTHONUNBUFFERED", names.ENV_SCHEDULE_COUNT, names.ENV_START_COUNT}
    assert ours["MASTER_ADDR"] in ("127.0.0.1", "localhost")
    assert int(ours["MASTER_PORT"]) > 0
    assert Path(ours["TORCHELASTIC_ERROR_FILE"]).parent.is_dir()


def test_a_script_finds_the_world_of_torchrun(place: Place) -> None:
    """Environment, arguments, module path, __file__ and folder equal those of torchrun."""
    script = place.script(TELL)
    command = (script, "--lr", "0.1", "two words", "--", "-h", "--nproc-per-node", "7", "ü")
    for theirs, ours in told_under_both(place, *command):
        assert_same_environment(theirs.pop("environment"), ours.pop("environment"))
        assert ours.pop("input") == "/dev/null"
        del theirs["input"]
        assert ours == theirs


def test_a_module_finds_the_world_of_torchrun(place: Place) -> None:
    """`-m package.module` gives the same environment as under torchrun."""
    (place.folder / "package").mkdir()
    place.script("", "package/__init__.py")
    place.script(TELL, "package/module.py")
    for theirs, ours in told_under_both(place, "-m", "package.module", "--lr", "0.1"):
        assert_same_environment(theirs.pop("environment"), ours.pop("environment"))
        for described in (theirs, ours):
            del described["input"]
        assert ours == theirs


def test_a_program_that_is_not_python(place: Place) -> None:
    """--no-python runs any program, with the rank's environment; --role names it in the output."""
    command = ("--no-python", "sh", "-c", 'echo "$0 $RANK of $WORLD_SIZE"; echo bad >&2', "it is")
    run = place.start("--nproc-per-node", "2", "--role", "trainer", *command).end(0)
    assert sorted(run.stdout.splitlines()) == [f"[trainer{r}]:it is {r} of 2" for r in (0, 1)]
    assert sorted(run.stderr.splitlines()) == ["[trainer0]:bad", "[trainer1]:bad"]


@pytest.mark.parametrize(
    ("options", "shown_out", "shown_err"),
    [((), 1, 1), (("-r", "1"), 0, 1), (("-r", "3"), 0, 0), (("-r", "3", "-t", "2"), 0, 1)],
    ids=["default", "r1", "r3", "r3-t2"],
)
def test_redirects_and_tee(
    place: Place, options: tuple[str, ...], shown_out: int, shown_err: int
) -> None:
    """-r removes a stream from the terminal, -t restores it; the files always have all output."""
    logs = place.folder / "elsewhere"
    command = ("--log-dir", str(logs), "--no-python", "sh", "-c", "echo good; echo bad >&2")
    run = place.start(*options, *command).end(0)
    assert run.stdout.count("good") == shown_out
    assert run.stderr.count("bad") == shown_err
    assert (logs / "attempt_0/0/stdout.log").read_text() == "good\n"
    assert (logs / "attempt_0/0/stderr.log").read_text() == "bad\n"


def test_every_option_of_torchrun_is_taken() -> None:
    """The command line accepts all options of torchrun, in each spelling."""
    from torch.distributed.run import get_args_parser

    parser = argparse.ArgumentParser()
    add(parser, RUN)
    known = {spelling for action in parser._actions for spelling in action.option_strings}
    theirs = {s for action in get_args_parser()._actions for s in action.option_strings}
    assert theirs <= known, sorted(theirs - known)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run an unchanged script on two simulated nodes, with spaces and umlauts in names."""
    odd = tmp_path_factory.mktemp("odd") / "mein Übungs 'Ordner' $HOME"
    odd.mkdir()
    with Place(odd / "place") as place:
        script = place.script(TRAINS, "mein träining.py")
        options = ("--nnodes", "2", "--nproc-per-node", "2")
        yield place.start(*options, script, "ein Wört", cwd=place.folder).end(0)


def lines_of(run: Run) -> list[list[str]]:
    """Return the lines that each rank prints, by its prefix."""
    shown = run.stdout.splitlines()
    prefixes = [f"[default{rank}]:" for rank in range(4)]
    return [[s.removeprefix(p) for s in shown if s.startswith(p)] for p in prefixes]


def test_an_untouched_script_trains_across_simulated_nodes(trained: Run) -> None:
    """init_process_group and a collective work without changes; each line has its prefix."""
    for rank, lines in enumerate(lines_of(trained)):
        assert lines[0].startswith(f"sum 6.0 of 4 node {rank // 2} ")
        assert trained.log(rank).splitlines() == lines
    assert sum(map(len, lines_of(trained))) == len(trained.stdout.splitlines())
    [line] = trained.stderr.splitlines()
    assert "this machine simulates 2 nodes" in line


def test_a_folder_with_spaces_and_umlauts(trained: Run) -> None:
    """Home, working folder, script and arguments can have spaces, umlauts and quotes."""
    for lines in lines_of(trained):
        assert lines[0].endswith(f" ['ein Wört'] {trained.place.folder}")


def test_how_a_script_may_end_well(trained: Run) -> None:
    """A rank can end successfully in each way of a Python program, without losing output."""
    assert [lines[1:] for lines in lines_of(trained)] == [
        ["late handler"],
        [],
        ["unfinished line"],
        ["late thread"],
    ]


BAD_ENDS = {
    # line: (status of the process, end of stderr, start of the message in the error file)
    "sys.exit('in words')": (1, "in words", ""),
    "sys.exit(3)": (3, "", ""),
    "os._exit(7)": (7, "", ""),
    "os.kill(os.getpid(), 15)": (-15, "", ""),
    "raise KeyboardInterrupt": (1, "KeyboardInterrupt", "KeyboardInterrupt"),
    "raise ValueError('\\udcff')": (1, "ValueError: \\udcff", "ValueError: \\udcff"),
    "raise ValueError('two\\nlines')": (1, "ValueError: two\nlines", "ValueError: two"),
    "f(": (1, "SyntaxError: '(' was never closed", "SyntaxError: '(' was never closed"),
    "import no_such": (1, "'no_such'", "ModuleNotFoundError: No module named 'no_such'"),
    "class E(Exception): __str__ = 1\nraise E": (1, "E: <exception str() failed>", "E: <exce"),
}


# Runs each script in a separate process, forked from one that has imported all modules.
FORKS = """
import json, os, sys
from rekindle.rank import program

statuses = []
for folder in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), 2)
        files = {
            "TORCHELASTIC_ERROR_FILE": f"{folder}/error.json",
            "REKINDLE_STACK_FILE": f"{folder}/stacks.log",
        }
        program.run("script", "bad.py", (), os.environ | files, folder)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def ended_badly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """Return the status of each script, and its folder."""
    base = tmp_path_factory.mktemp("bad")
    folders = []
    for number, line in enumerate(BAD_ENDS):
        folders.append(base / str(number))
        folders[-1].mkdir()
        (folders[-1] / "bad.py").write_text(f"import os, sys\n{line}\n")
    done = run_command([sys.executable, "-c", FORKS, *map(str, folders)])
    assert done.returncode == 0, done.stderr
    return dict(zip(BAD_ENDS, zip(json.loads(done.stdout), folders, strict=True), strict=True))


def escaped(text: str) -> str:
    """Return a text as Python prints it to stderr."""
    return text.encode(errors="backslashreplace").decode()


@pytest.mark.parametrize("line", BAD_ENDS)
def test_how_a_script_may_end_badly(ended_badly: dict[str, tuple[int, Path]], line: str) -> None:
    """Status, traceback and error file of a failed script equal those of a Python program."""
    status, last, message = BAD_ENDS[line]
    found, folder = ended_badly[line]
    errors, error_file = (folder / "stderr").read_text(), folder / "error.json"
    assert found == status, errors
    assert errors.rstrip().endswith(last)
    assert error_file.exists() == bool(message)
    if message:
        assert str(folder / "bad.py") in errors, "the traceback names the script"
        assert "rekindle" not in errors, "the traceback shows frames that are not the user's"
        record = json.loads(error_file.read_text())
        content = record["message"]
        assert escaped(content["message"]).startswith(message)
        assert escaped(content["extraInfo"]["py_callstack"]) == errors
        assert record["textOfScript"] == ("raise" in line)
