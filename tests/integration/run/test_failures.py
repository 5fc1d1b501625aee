"""Failing scripts, ports in use, and job ids: each gives a clear error, and the job ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from jobs import Place, Run
from waiting import wait_until

from rekindle import names
from rekindle.recovery.faults.fault import FaultKind
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

# The first attempt fails in one rank, after all have printed. In later attempts all ranks fail.
FAILS = """
import os, time

def train(rank, count):
    print("try", count, "of at most", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    open(f"begun-{count}-{rank}", "w").close()
    while not all(os.path.exists(f"begun-{count}-{each}") for each in range(4)):
        time.sleep(0.01)
    if count == 0 and rank == 1:
        raise RuntimeError("only once")
    if count == 0:
        time.sleep(600)
    if rank != 2:  # the others fail because of it, and later
        time.sleep(0.5)
        raise ConnectionError(f"peer of {rank} is gone")
    raise ValueError("the first")

train(int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run a job of four ranks that fails once in one rank, and then twice in all ranks."""
    with Place(tmp_path_factory.mktemp("failed") / "place") as place:
        script = place.script(FAILS)
        yield place.start("--nproc-per-node", "4", "--max-restarts", "5", script).end(1)


def test_a_script_is_tried_again(failed: Run) -> None:
    """--max-restarts ends all ranks and starts them with the next TORCHELASTIC_RESTART_COUNT."""
    for restart in (0, 1):
        for rank in range(4):
            assert failed.log(rank, restart=restart) == f"try {restart} of at most 5\n"
    first = journal.incidents(failed.events())[0]
    assert (first.strategy, first.closed) == (Strategy.RESTART, True)
    assert "RuntimeError: only once" in first.reason


def test_all_ranks_raise(failed: Run) -> None:
    """The first failing rank's traceback is shown; the same error after a restart ends the job."""
    report = failed.stderr[failed.stderr.index(" ERROR launcher: the job failed") :]
    assert "first fault: rank 2 on node 0: rank 2 raised ValueError: the first" in report
    assert f'{failed.place.folder / "train.py"}", line 16, in train' in report
    assert "ConnectionError" not in report
    decided = [event.strategy for event in failed.events_of(journal.Decided)]
    assert decided == [Strategy.RESTART, Strategy.RESTART, Strategy.FAIL]
    reason = failed.events_of(journal.Ended)[-1].reason
    assert "the script is the likely cause" in reason, failed.story()


COPIES = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record
class LabelConnectError(Exception): pass
{decorator}
def train():
    raise {kind}("[/data/gloo/transport/tcp/pair.cc:553] Broken pipe: NCCL error, \\udcff")

{call}
"""
CALL = "train()"
EXIT = """
try:
    train()
except Exception:
    sys.exit(1)
"""
POOL = """
import multiprocessing
with multiprocessing.Pool(1) as pool:
    pool.apply(train)
"""


def check_error_of_script(run: Run, line: str, message: str) -> None:
    """Check that the job ended with the script's traceback, without a recovery."""
    assert [event.strategy for event in run.events_of(journal.Decided)] == [Strategy.FAIL]
    (incident,) = journal.incidents(run.events())
    assert {fault.kind for fault in incident.faults} == {FaultKind.USER_CODE}
    report = run.stderr[run.stderr.index(" ERROR launcher: the job failed") :]
    assert line in report
    assert message in report


@pytest.mark.parametrize(
    ("decorator", "kind", "call"),
    [
        ("", "RuntimeError", CALL),
        ("", "LabelConnectError", CALL),
        ("@record", "RuntimeError", CALL),
        ("@record", "LabelConnectError", EXIT),
        ("", "RuntimeError", POOL),
    ],
    ids=["plain", "own type", "@record", "@record and exit", "process pool"],
)
def test_the_script_raises_an_error_with_a_librarys_text(
    place: Place, decorator: str, kind: str, call: str
) -> None:
    """The job ends with the script's traceback, without a recovery.

    Each of these texts is that of a broken link if a library raises it. The last character, for
    example of a file name, is not UTF-8.
    """
    script = place.script(COPIES.format(decorator=decorator, kind=kind, call=call))
    run = place.start("--nproc-per-node", "2", script).end(1)
    message = f"{kind}: [/data/gloo/transport/tcp/pair.cc:553] Broken pipe"
    check_error_of_script(run, f'{place.folder / "train.py"}", line 7, in train', message)


LOSES = """
import os, threading, time

def lose():
    raise KeyError("a bug")

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=lose, name="their-thread").start()
    while not os.path.exists("seen"):
        time.sleep(0.02)
    threading.Thread(target=lose, name="rekindle-example").start()
    time.sleep(3600)
print("second process")
"""


def test_a_rank_loses_one_of_rekindles_threads(place: Place) -> None:
    """The rank ends, and the incident names the thread. The job recovers as from a killed rank.

    A thread of the script that fails ends nothing.
    """
    script = place.script(LOSES)
    run = place.start("--nproc-per-node", "1", "--max-restarts", "1", script)
    wait_until(lambda: "in thread their-thread" in run.stderr, "the traceback of the thread")
    (place.folder / "seen").touch()
    run.end(0)
    (incident,) = journal.incidents(run.events())
    assert incident.strategy is Strategy.RESTART
    assert incident.cause.kind is FaultKind.PROCESS
    assert "the thread 'rekindle-example' failed: KeyError('a bug')" in incident.cause.message
    assert "in lose" in incident.cause.traceback


def test_an_installed_package_is_the_script(place: Place) -> None:
    """With -m, a module of the same package in site-packages belongs to the script."""
    package = place.folder / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "train.py").write_text("from trainer.data import load\nload()\n")
    text = "data/gloo/transport/cats.h is missing"
    (package / "data.py").write_text(f"def load():\n    raise RuntimeError('{text}')\n")
    run = place.start("-m", "trainer.train", cwd=package.parent).end(1)
    check_error_of_script(run, f'{package / "data.py"}", line 2, in load', f"RuntimeError: {text}")


def test_rekindle_is_no_script(place: Place) -> None:
    """The text of an error that Rekindle raises in a rank counts."""
    script = place.script("import rekindle\nrekindle.open_store('not absolute')")
    run = place.start(script).end(1)
    log = run.directory.path / names.LOGS_DIRECTORY / "attempt_0" / "0"
    record = json.loads((log / names.ERROR_FILE).read_text())
    assert record["message"]["message"].startswith("rekindle.errors.UsageError")
    assert record[names.TEXT_OF_SCRIPT] is False


def test_a_full_disk_does_not_hide_the_error(place: Place) -> None:
    """If the rank cannot write its error file, its log has the traceback and the reason."""
    script = place.script("""
import os
os.symlink("/dev/full", os.environ["TORCHELASTIC_ERROR_FILE"] + ".unfinished")
raise KeyError("the script's own")
""")
    run = place.start(script).end(1)
    errors = run.log(0, "stderr")
    assert 'KeyError: "the script\'s own"' in errors
    assert " WARNING rank node=0 rank=0: the rank cannot write its error file: OSError(28" in errors
    assert "During handling" not in errors
    assert "rank 0 ended with exit status 1" in run.stderr


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"message": {"message": "E: own", "extraInfo": null}}', "rank 0 raised E: own"),
        ('{"message": {"message": "E: own", "extraInfo": "x"}}', "rank 0 raised E: own"),
        (
            '{"message": {"message": "E: own", "extraInfo": {"timestamp": "nan"}}}',
            "rank 0 raised E: own",
        ),
        ('{"message": "E: \\udcff"}', "rank 0 raised E: \\udcff"),
        ("[" * 100_000, "rank 0 ended with exit status 1"),
        ("{", "rank 0 ended with exit status 1"),
    ],
    ids=["null", "text", "no time", "not UTF-8", "deep", "truncated"],
)
def test_an_error_file_of_another_tool(place: Place, content: str, reason: str) -> None:
    """The job ends with the file's message, or with the status if the file has none."""
    (place.folder / "content").write_text(content)
    script = place.script("""
import os, shutil
shutil.copy("content", os.environ["TORCHELASTIC_ERROR_FILE"])
os._exit(1)
""")
    run = place.start_quick(script).end(1)
    assert reason in run.events_of(journal.Ended)[-1].reason


# Each attempt ends in another way without a traceback.
ENDS = """
import os, sys, time

count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
if rank == "1" and count == 0:
    os.kill(os.getpid(), 9)
if rank == "1" and count == 1:
    sys.exit(3)
if rank == "0" and count == 2:
    os.write(int(os.environ["REKINDLE_CHANNEL_FD"]), b"garbage")
if rank == "2" and count == 3:
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
# The launcher's message about each attempt.
SAID = {
    "a signal": (0, "rank 1 was ended by signal 9 (SIGKILL)"),
    "a status": (1, "rank 1 ended with exit status 3"),
    "garbage on the channel": (2, "rank 0 was ended by signal 9"),
    "no restart is left": (3, "rank 2 was ended by signal 9 (SIGKILL)"),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run three ranks without a Session that end in different ways, until no restart is left."""
    with Place(tmp_path_factory.mktemp("untouched") / "place") as place:
        options = ("--nproc-per-node", "3", "--max-restarts", "3")
        yield place.start_quick(place.script(ENDS), *options).end(1)


@pytest.mark.parametrize("row", SAID)
def test_an_untouched_rank_that_ends(untouched: Run, row: str) -> None:
    """The message names the rank and its end; the agent ends the other ranks."""
    number, words = SAID[row]
    incident = journal.incidents(untouched.events())[number]
    assert words in incident.reason
    assert words in untouched.stderr
    last = number == len(SAID) - 1
    assert incident.strategy == (Strategy.FAIL if last else Strategy.RESTART)
    assert incident.steps_lost is None  # only the script knows its steps


def test_garbage_on_a_ranks_channel(untouched: Run) -> None:
    """The agent names the rank whose message it cannot read."""
    assert "rank 0: not a message of a rank" in untouched.stdout + untouched.stderr


def test_a_rank_that_cannot_be_started(place: Place) -> None:
    """If the log folder of one rank cannot be created, the job and the started ranks end.

    The failing rank is neither the first nor the last of its node.
    """
    logs = place.folder / "logs"
    (logs / "attempt_0").mkdir(parents=True)
    (logs / "attempt_0" / "1").write_text("in the way")
    script = place.script("import time\ntime.sleep(600)\n")
    options = ("--log-dir", str(logs), "--nproc-per-node", "3")
    run = place.start_quick(script, *options).end(1)
    assert "the agent could not start rank 1" in run.stderr
    assert str(logs) in run.stderr


@pytest.mark.parametrize(
    ("store", "environment", "reason"),
    [
        ("loop/store", {}, "Too many levels of symbolic links"),
        ("s3://bucket/x", {names.ENV_STORE_ACCESS_KEY_ID: "half"}, "a part of the store's cred"),
    ],
    ids=["the agent cannot read it", "the agent cannot open it"],
)
def test_a_store_that_no_agent_can_use(
    place: Place, store: str, environment: dict[str, str], reason: str
) -> None:
    """The job fails immediately, and its end has the reason."""
    (place.folder / "loop").symlink_to("loop")
    options = ("--nnodes", "2", "--checkpoint-dir", store)
    script = place.script("raise SystemExit('was run')")
    run = place.start_quick(script, *options, env=place.environment(environment)).end(1)
    (cause,) = {each.cause.kind for each in journal.incidents(run.events())}
    assert cause is FaultKind.LAUNCH
    assert reason in run.events_of(journal.Ended)[-1].reason
    assert reason in run.stderr[run.stderr.index(" ERROR launcher: the job failed") :]


def test_a_command_line_that_is_refused(place: Place) -> None:
    """A real process ends with status 2, as `main` does in unit/cli/test_refused_commands.py."""
    place.script("raise SystemExit('was run')")
    command = [sys.executable, "-m", "rekindle.cli.main", "run", "--nnodes", "3:2", "train.py"]
    ended = subprocess.run(
        command,
        cwd=place.folder,
        env=place.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert " ERROR launcher: --nnodes 3:2: give MIN:MAX" in ended.stderr
    assert not list(place.home.glob("jobs/*/journal.jsonl"))


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Return a port of this machine that is in use."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_for_the_coordinator(place: Place, taken_port: int) -> None:
    """With --listen on a taken port the command fails before it starts a process."""
    script = place.script("")
    run = place.start("--listen", f"127.0.0.1:{taken_port}", script).end(2)
    assert f"cannot listen on 127.0.0.1:{taken_port}: Address already in use" in run.stderr
    assert run.events() == []


def test_a_port_in_use_for_the_ranks(place: Place, taken_port: int) -> None:
    """--master-port on a taken port fails the job with the port in the reason; no rank starts."""
    script = place.script("print('was run')")
    port = ("--master-port", str(taken_port))
    for run in (
        place.start(*port, "--max-restarts", "3", script),
        place.start_quick(script, *port, job_id="quick"),
    ):
        run.end(1)
        assert str(taken_port) in run.stderr
        assert "address already in use" in run.stderr.lower()
        assert "was run" not in run.stdout
        assert not run.events_of(journal.RanksStarted)


def test_one_job_id_is_one_job(place: Place) -> None:
    """A second `rekindle run` of a running job's id is refused, and the first continues."""
    script = place.script("import sys\nprint('runs')\nopen('go').close()\n")
    os.mkfifo(place.folder / "go")
    run = place.start_quick(script)
    run.wait_for_output(0, "runs")
    second = place.start_quick(script)
    second.process.wait()
    assert second.process.returncode == 1
    assert "another process runs job job" in second.stderr
    (place.folder / "go").write_text("")
    run.end(0)


def test_a_job_id_is_resumed_as_its_next_attempt(place: Place) -> None:
    """A run with the id of an ended job is the next attempt, in the same journal.

    That attempt fails in the first line of its script. The output has the error with its traceback,
    and no restart follows.
    """
    place.start_quick(place.script(""), "--max-restarts", "0").end(0)
    place.script("import no_such_module\n", "own.py")
    run = place.start("--nproc-per-node", "2", place.script("import own\n")).end(1)
    assert [event.attempt for event in run.events_of(journal.JobStarted)] == [0, 1]
    assert [event.outcome for event in run.events_of(journal.Ended)] == ["succeeded", "failed"]
    assert [event.seq for event in run.events()] == list(range(1, len(run.events()) + 1))
    assert "ModuleNotFoundError: No module named 'no_such_module'" in run.stderr
    assert f'{place.folder / "own.py"}", line 1' in run.stderr
    assert [event.strategy for event in run.events_of(journal.Decided)] == [Strategy.FAIL]
