"""A script made for torchrun finds under `rekindle run` what it finds under torchrun."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import Place

from rekindle import arguments, names

TELL = """
import json, os, sys, threading
from pathlib import Path

told = {
    "environment": dict(os.environ), "arguments": sys.argv[1:], "program": Path(sys.argv[0]).name,
    "first path": sys.path[0], "file": __file__, "name": __name__, "folder": os.getcwd(),
    "main": sys.modules["__main__"].__dict__ is globals(), "threads": threading.active_count(),
    "input": os.readlink("/proc/self/fd/0"),
}
Path(os.environ["TELL_IN"], os.environ["RANK"]).write_text(json.dumps(told))
"""

# Values that cannot be equal: ports, ids, and files of the launcher's own.
OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TELL_IN", "_"}
# Said by torchrun's launcher to itself; its ranks are not addressed.
LAUNCHERS = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}

ALL_REDUCE = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
own = torch.tensor([float(dist.get_rank())])
dist.all_reduce(own)
print("sum", own.item(), "of", dist.get_world_size(), "node", os.environ["GROUP_RANK"])
dist.destroy_process_group()
"""


def torchrun(place: Place, folder: Path, *command: str) -> None:
    """Run a script under the real torchrun."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *command]
    environment = place.environment({"TELL_IN": str(folder)})
    subprocess.run(program, cwd=place.folder, env=environment, capture_output=True, check=True)


def told_under_both(place: Place, *command: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each rank of a script tells, under torchrun and under rekindle."""
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
    """Every variable of torchrun is there with its value; else Rekindle's, and two of ModelArts."""
    for name in theirs.keys() - OWN - LAUNCHERS:
        if name != "MASTER_ADDR":
            assert ours.get(name) == theirs[name], name
    more = {name for name in ours.keys() - theirs.keys() if not name.startswith("REKINDLE_")}
    # torchrun says the first by an option: python -u
    assert more <= {"PYTHONUNBUFFERED", names.ENV_SCHEDULE_COUNT, names.ENV_START_COUNT}
    assert ours["MASTER_ADDR"] in ("127.0.0.1", "localhost")
    assert int(ours["MASTER_PORT"]) > 0
    assert Path(ours["TORCHELASTIC_ERROR_FILE"]).parent.is_dir()


def test_a_script_finds_the_world_of_torchrun(place: Place) -> None:
    """Environment, arguments, module path, __file__ and folder are those of torchrun."""
    script = place.script(TELL)
    command = (script, "--lr", "0.1", "two words", "--", "-h", "--nproc-per-node", "7", "ü")
    for theirs, ours in told_under_both(place, *command):
        assert_same_environment(theirs.pop("environment"), ours.pop("environment"))
        assert ours.pop("input") == "/dev/null"
        del theirs["input"]
        assert ours == theirs


def test_a_module_finds_the_world_of_torchrun(place: Place) -> None:
    """`-m package.module` as well."""
    (place.folder / "package").mkdir()
    place.script("", "package/__init__.py")
    place.script(TELL, "package/module.py")
    for theirs, ours in told_under_both(place, "-m", "package.module", "--lr", "0.1"):
        assert_same_environment(theirs.pop("environment"), ours.pop("environment"))
        for told in (theirs, ours):
            del told["input"]
        assert ours == theirs


def test_an_untouched_script_trains_across_pretended_nodes(place: Place) -> None:
    """init_process_group and a collective work with no line changed; every line has its prefix."""
    script = place.script(ALL_REDUCE)
    run = place.start("--nnodes", "2", "--nproc-per-node", "2", script).end(0)
    shown = sorted(run.stdout.splitlines())
    assert shown == [f"[default{rank}]:sum 6.0 of 4 node {rank // 2}" for rank in range(4)]
    for rank in range(4):
        assert run.log(rank) == f"sum 6.0 of 4 node {rank // 2}\n"
    assert run.stderr == ""


def test_a_program_that_is_not_python(place: Place) -> None:
    """--no-python runs anything, with the rank's environment; --role names it in the output."""
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
    """-r keeps a stream off the terminal, -t brings it back; the files have all of it always."""
    logs = place.folder / "elsewhere"
    command = ("--log-dir", str(logs), "--no-python", "sh", "-c", "echo good; echo bad >&2")
    run = place.start(*options, *command).end(0)
    assert run.stdout.count("good") == shown_out
    assert run.stderr.count("bad") == shown_err
    assert (logs / "attempt_0/0/stdout.log").read_text() == "good\n"
    assert (logs / "attempt_0/0/stderr.log").read_text() == "bad\n"


def test_every_option_of_torchrun_is_taken() -> None:
    """The command line is a superset of torchrun's, in every spelling."""
    from torch.distributed.run import get_args_parser

    parser = argparse.ArgumentParser()
    arguments.add_run_arguments(parser)
    known = {spelling for action in parser._actions for spelling in action.option_strings}
    theirs = {s for action in get_args_parser()._actions for s in action.option_strings}
    assert theirs <= known, sorted(theirs - known)


GOOD_ENDS = """
import atexit, os, sys, threading, time

rank = int(os.environ["RANK"])
if rank == 0:
    sys.exit()
if rank == 1:
    sys.exit(256)
if rank == 2:
    print("unfinished line", end="")
if rank == 3:
    threading.Thread(target=lambda: (time.sleep(0.3), print("late thread"))).start()
if rank == 4:
    atexit.register(print, "late handler")
"""


def test_how_a_script_may_end_well(place: Place) -> None:
    """However a Python program ends well, it does so as a rank, and nothing it prints is lost."""
    run = place.start("--nproc-per-node", "5", place.script(GOOD_ENDS)).end(0)
    assert sorted(run.stdout.splitlines()) == [
        "[default2]:unfinished line",
        "[default3]:late thread",
        "[default4]:late handler",
    ]
    assert run.stderr == ""


def test_a_status_of_its_own_fails_the_job(place: Place) -> None:
    """sys.exit(3) of one rank is told; the launcher's own status is 1, as torchrun's is."""
    script = place.script(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(3)\ntime.sleep(600)\n"
    )
    run = place.start_quick(script, "--nproc-per-node", "2").end(1)
    assert "rank 1 ended with exit status 3" in run.stderr


BAD_ENDS = {
    # line: (status of the process, end of stderr, the exception's part of it in the error file)
    "sys.exit('in words')": (1, "in words", ""),
    "sys.exit(3)": (3, "", ""),
    "os._exit(7)": (7, "", ""),
    "os.kill(os.getpid(), 15)": (-15, "", ""),
    "raise KeyboardInterrupt": (1, "KeyboardInterrupt", "KeyboardInterrupt"),
    "raise ValueError('two\\nlines')": (1, "ValueError: two\nlines", "ValueError: two"),
    "f(": (1, "SyntaxError: '(' was never closed", "SyntaxError: '(' was never closed"),
    "import no_such": (1, "'no_such'", "ModuleNotFoundError: No module named 'no_such'"),
    "class E(Exception): __str__ = 1\nraise E": (1, "E: <exception str() failed>", "E: <exce"),
}


@pytest.mark.parametrize("line", BAD_ENDS)
def test_how_a_script_may_end_badly(tmp_path: Path, line: str) -> None:
    """Status, traceback and error file of a script that fails are a Python program's."""
    status, last, message = BAD_ENDS[line]
    script, error_file = tmp_path / "bad.py", tmp_path / "error.json"
    script.write_text(f"import os, sys\n{line}\n")
    environment = {
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "REKINDLE_STACK_FILE": str(tmp_path / "stacks.log"),
    }
    become = "import os, sys; from rekindle.runtime import program; program.run"
    become += f"('script', 'bad.py', (), os.environ | {environment}, {str(tmp_path)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", become], capture_output=True, text=True, check=False
    )
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.rstrip().endswith(last)
    assert error_file.exists() == bool(message)
    if message:
        assert str(script) in ended.stderr, "the traceback names the script"
        assert "rekindle" not in ended.stderr, "the traceback shows frames that are not the user's"
        told = json.loads(error_file.read_text())["message"]
        assert told["message"].startswith(message)
        assert told["extraInfo"]["py_callstack"] == ended.stderr
