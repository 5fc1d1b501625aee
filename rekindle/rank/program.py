"""Runs the user's program inside a forked rank, as `python script.py` would run it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import io
import json
import logging
import multiprocessing.util
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

from rekindle import names
from rekindle.console import say, start_rank
from rekindle.errors import UnexpectedError
from rekindle.rank import earlier_files, sources, taskd_names
from rekindle.rank.error_origin import chain_of, is_text_of_script

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_LONGEST_TEXT = 500  # characters of an error in a line
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def stack_signal() -> int:
    """Return the signal with which the agent requests the stacks of a rank.

    Scripts and libraries use the signals that have names, and no shell sends this one. It is a
    function because a client may run on a system without real-time signals.
    """
    return signal.SIGRTMIN + 8


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. An earlier death counts, too.

    parent: its process id, from before this process could lose it.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_parent() -> None:
    """Undo die_with_parent()."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def take_streams(stdout: int, stderr: int) -> None:
    """Make the given descriptors this process's standard output and error; its input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    # Line by line, as torchrun's `python -u` shows it; a killed rank would lose a buffered block.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    # As in Python: a text that is not UTF-8, for example a file name, must not raise another error.
    error_file = io.FileIO(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(error_file, errors="backslashreplace", line_buffering=True)


def run(
    kind: str,
    target: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    working_directory: str,
) -> NoReturn:
    """Run the user's program in this process, and end with its status.

    For a Python exception this prints the traceback, writes the rank's error file (torchrun's
    format), and ends the process with status 1.
    """
    os.environ.clear()
    os.environ.update(environment)
    start_rank(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.excepthook = _on_thread
    reseed()
    if kind == "program":
        execute(target, arguments, working_directory)
    answer_signals(Path(environment[names.ENV_STACK_FILE]))
    if names.ENV_SLOT in environment:  # not in a program of the agent, such as a node check
        _name_temporary_folder(names.temporary_folder(environment))
    # An error must not be judged by the fork server's main module, which runpy would put back.
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    try:
        os.chdir(working_directory)
        sys.argv = [target, *arguments]
        earlier_files.watch()
        taskd_names.install()
        if kind == "module":
            sys.path.insert(0, working_directory)
            main.__spec__ = ModuleSpec(target, None)
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            script = Path(target).absolute()  # as Python's own __file__, whatever folder comes next
            sources.note(str(script))
            sys.path[0] = str(script.resolve().parent)
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as request:
        if request.__context__ is not None and Path(os.environ.get(_ERROR_FILE, "")).is_file():
            _try_to_record(request.__context__)  # a script with @record that catches its error
        end(_status(request), orderly=True)
    except BaseException as error:
        sys.stderr.write("".join(_frames_of_script(error)))
        *_, first = chain_of(error)
        if first is not error:
            say(f"the script raised {_in_short(error)} while it handled {_in_short(first)}")
        _try_to_record(error)
        end(1, orderly=False)  # atexit handlers of a rank with an error would wait for its peers
    end(0, orderly=True)


def _name_temporary_folder(name: str) -> None:
    """Let multiprocessing make its folder with a name that the agent knows.

    The workers of data loaders use the same folder. If this process is killed, the agent removes
    it.
    """
    folder = Path(tempfile.gettempdir(), name)

    def make() -> str:
        folder.mkdir(mode=0o700, exist_ok=True)
        return str(folder)

    multiprocessing.util.get_temp_dir = make
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    multiprocessing.util.Finalize(None, remove, exitpriority=-100)


def _in_short(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[-1][:_LONGEST_TEXT]


def _on_thread(args: threading.ExceptHookArgs) -> None:
    """Handle the error of a thread. Without one of Rekindle's threads a rank must not continue."""
    threading.__excepthook__(args)
    name = args.thread.name if args.thread is not None else ""
    if name.startswith(names.OUR_THREADS) and args.exc_type is not SystemExit:
        error = UnexpectedError(f"the thread {name!r} failed: {args.exc_value!r}")
        error.__cause__ = args.exc_value
        _try_to_record(error)
        end(1, orderly=False)


def end(status: int, *, orderly: bool) -> NoReturn:
    """End this process as an interpreter does, but without its teardown.

    The teardown of DDP and gloo can deadlock in torch 2.13. The reducer's last reference joins
    gloo's thread with the GIL held, and that thread waits for the GIL.
    """
    earlier_files.end()
    if orderly:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing's children do
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(status)


def _status(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def reseed() -> None:
    """Give each forked process its own numpy random stream, as in a newly started process."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def answer_signals(path: Path) -> None:
    """Make this process append its stacks to a file at each stack_signal().

    The handler is faulthandler's. It runs in C, even if the interpreter waits or another thread
    holds the GIL. A process does not answer while it is stopped, or in a system call that nothing
    interrupts.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:  # a full disk must not stop the training
        say(f"the rank cannot write its stacks: {error}")
        return
    faulthandler.register(stack_signal(), file=fd, all_threads=True, chain=False)


def execute(target: str, arguments: tuple[str, ...], working_directory: str) -> None:
    """Replace this process by any program (torchrun's --no-python)."""
    try:
        os.chdir(working_directory)
        os.execvp(target, [target, *arguments])
    except OSError as error:
        say(f"the rank cannot run {target}: {error}", logging.ERROR)
        os._exit(127)


def _try_to_record(error: BaseException) -> None:
    try:
        record_error(error)
    except Exception as failure:  # a full disk, or an unreadable file of @record
        say(f"the rank cannot write its error file: {failure!r}")


def record_error(error: BaseException) -> None:
    """Write the error file that the agent reads.

    If the script's own @record has written it, this only adds whether the script chose its text.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    try:
        message = json.loads(Path(path).read_text())["message"]
    except FileNotFoundError:
        message = _message(error)
        of_script = is_text_of_script(error)
    else:
        of_script = any(map(is_text_of_script, _recorded(message, error)))
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(json.dumps({"message": message, names.TEXT_OF_SCRIPT: of_script}))
    unfinished.replace(path)


def _recorded(message: Any, error: BaseException) -> Iterator[BaseException]:
    """Yield the error that @record has written: this one, or one that it came from."""
    text = message.get("message") if isinstance(message, dict) else message
    for each in chain_of(error):
        if f"{type(each).__name__}: {each}" == text:
            yield each


def _message(error: BaseException) -> dict[str, Any]:
    """Describe the error in torchrun's format."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    # A message may have more lines; before that of a SyntaxError is the indented source.
    return {
        "message": next((line for line in lines if line.lstrip() == line), type(error).__name__),
        "extraInfo": {
            "py_callstack": "".join(_frames_of_script(error)),
            "timestamp": str(time.time()),
        },
    }


def _frames_of_script(error: BaseException) -> list[str]:
    """Format the traceback without the frames of this file and of runpy above the script's."""
    frames = error.__traceback__
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return traceback.format_exception(type(error), error, frames)
