"""Run msrun as a rank, with Rekindle's agent instead of TaskD's.

    rekindle run --no-python --nnodes N \\
        python -m rekindle.training.msrun [options] script ...

msrun gives its workers to an agent that it imports by the names of MindCluster's TaskD
(`taskd.api.taskd_agent_api`). Without an agent, msrun kills all workers immediately when it detects
that one is lost. It then waits for its scheduler, for 31 s on a CPU. A scheduler that has lost a
worker serves no new workers there. This agent stops the other workers with SIGTERM before it kills
them. It also ends the scheduler, and exits with the failed worker's status. So the job's
coordinator restarts all nodes' msruns, at a port that was not used before or on other nodes.

Sources: mindspore/utils/utils.py (RSCPluginHandle) and mindspore/parallel/cluster of MindSpore
2.10.0; the times are measured.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.console import say, start_rank
from rekindle.errors import RekindleError, UsageError
from rekindle.rank import taskd_names
from rekindle.training import msrun_worker
from rekindle.waiting import until

LOOK_S = 0.1
GRACE_S = 8.0  # for workers, after SIGTERM
SCHEDULER_S = 60.0  # for the scheduler, once all workers are done
_PROGRAMS = ("python", "python3", "pytest")  # msrun starts these directly; the rest are scripts
_OF_AGENT = ("MS_ENABLE_TFT", "MS_ENABLE_RECOVERY")
_INTERVALS = ("MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER")
Process = subprocess.Popen[bytes]
# With any of these values msrun requests an agent; RSC has no other effect.
_ASKING = ("TTP:1", "UCE:1", "ARF:1", "TSP:1", "HCCE:1", "RSC:1")


def main() -> None:
    """Run msrun with the user's options; the job's values for nodes are the defaults."""
    start_rank(os.environ)
    try:
        sys.argv[1:1] = options_of(os.environ)
        agent = Agent(os.environ)
        os.environ |= agent.environment()
        taskd_names.install(agent.modules())  # an installed TaskD stays: the user wants its agent
        try:
            from mindspore.parallel.cluster.run import get_args, run
        except ModuleNotFoundError as error:
            raise UsageError(f"{error}, in {sys.executable}; use a Python that has it") from error
        args = get_args()
        if args.worker_num == 0:
            args.worker_num = args.local_worker_num * int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        agent.has_all = args.local_worker_num == args.worker_num
        # Use this Python; msrun would use the first one in PATH.
        python = [] if args.task_script in _PROGRAMS else [sys.executable]
        args.task_script_args = [*python, args.task_script, *args.task_script_args]
        args.task_script = msrun_worker.__file__
        run(args)
    except RekindleError as error:
        say(str(error), logging.ERROR)
        sys.exit(1)


def options_of(environment: Mapping[str, str]) -> list[str]:
    """Return msrun's options from the job's values. The caller puts the user's options after them.

    worker_num 0 means: the workers of this node times the number of nodes. Raises UsageError: a
    node has several msruns.
    """
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"this node has {environment['LOCAL_WORLD_SIZE']} msruns; give --nproc-per-node 1 to "
            "rekindle, and --local_worker_num to msrun"
        )
    options = ["--join=True", "--worker_num=0"]
    for name, option in (
        ("MASTER_ADDR", "master_addr"),
        ("MASTER_PORT", "master_port"),
        ("GROUP_RANK", "node_rank"),
    ):
        if name in environment:
            options.append(f"--{option}={environment[name]}")
    return options


class Agent:
    """Starts msrun's workers through msrun's callbacks, and waits until they have ended.

    environment: the user's environment, which the workers get back.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._users = dict(environment)
        # The callbacks of msrun's process manager, by name.
        self._callbacks: dict[str, types.MethodType] = {}
        self._stop_signal: signal.Signals | None = (
            None  # the signal with which msrun's parent stops it
        )
        self.has_all = True  # whether this node has all workers of the job

    def environment(self) -> dict[str, str]:
        """Return the variables for msrun: a request for an agent, and the Python for children."""
        asked = self._users.get("MS_ENABLE_TFT", "")
        if not any(each in asked for each in _ASKING):
            asked = "{" + ", ".join([*filter(None, [asked.strip(" {}")]), "RSC:1"]) + "}"
        path = self._users.get("PATH", os.defpath)
        return {
            "MS_ENABLE_TFT": asked,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), path)),
            # By default a worker waits 3 to 5 s before it tries to reach the scheduler again.
            **{name: self._users.get(name, "1") for name in _INTERVALS},
            msrun_worker.ENV_PATH: path,
            msrun_worker.ENV_MSRUN: str(os.getpid()),
        }

    def modules(self) -> dict[str, dict[str, Any]]:
        """Return the names in the modules that msrun imports: of TaskD, and of earlier TaskDs."""
        register = self._callbacks.__setitem__
        agent = {
            "init_taskd_agent": lambda config: config == {"Framework": "MindSpore"},
            "register_func": register,
            "start_taskd_agent": self.start,
        }
        methods = {"register_callbacks": register, "start": self.start}
        return {
            "taskd.api.taskd_agent_api": agent,
            "taskd.python.framework.agent.ms_mgr.msrun_plugin": {
                "MSRunPlugin": lambda: types.SimpleNamespace(**methods)
            },
        }

    def start(self) -> None:
        """Start all workers, wait, and end the rest. Raises SystemExit: a worker has failed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # Hide the request for an agent from the workers: because of it MindSpore refuses some
        # features that they may use. msrun has set one of the two variables itself.
        for name in _OF_AGENT:
            os.environ.pop(name, None)
            if name in self._users:
                os.environ[name] = self._users[name]
        manager: Any = self._callbacks["START_ALL_WORKER"].__self__
        try:
            self._callbacks["START_ALL_WORKER"]()
            status = self._watch(manager.proc_rank_map, manager.msn_process)
        finally:
            self._end([*manager.proc_rank_map.values()], manager.msn_process)
        if status != 0:
            sys.exit(status)

    def _on_signal(self, number: int, _: object) -> None:
        self._stop_signal = signal.Signals(number)

    def _watch(self, workers: Mapping[int, Process], scheduler: Process | None) -> int:
        """Return the first failure's status as a shell does, or 0; 128 + signal after a signal."""
        done_at = 0.0
        while self._stop_signal is None:
            ends = [(f"local worker {rank}", each) for rank, each in workers.items()]
            ends += [("the scheduler", scheduler)] if scheduler is not None else []
            codes = [_end_of(process) for _, process in ends]
            for (who, process), code in zip(ends, codes, strict=True):
                if code:
                    return _report_end(f"{who} (process {process.pid})", code)
            if None not in codes:
                return 0
            # The scheduler ends on its own when all workers have ended, also on other nodes.
            if self.has_all and None not in codes[: len(workers)]:
                done_at = done_at or time.monotonic()
                if time.monotonic() - done_at > SCHEDULER_S:
                    say("the scheduler did not end, so msrun ends it")
                    return 0
            time.sleep(LOOK_S)
        return 128 + self._stop_signal

    def _end(self, workers: Sequence[Process], scheduler: Process | None) -> None:
        """Send SIGTERM to the workers; kill late workers with their children, and the scheduler."""
        for each in workers:
            if _end_of(each) is None:
                os.killpg(each.pid, signal.SIGTERM)
        until(lambda: None not in map(_end_of, workers), GRACE_S, LOOK_S)
        for each in workers:
            if each.returncode is None:  # not reaped yet, so the number still names its group
                os.killpg(each.pid, signal.SIGKILL)
        self._callbacks["KILL_WORKER"]([-1])  # and the processes that show their output
        if scheduler is not None and scheduler.poll() is None:
            scheduler.kill()


def _end_of(process: Process) -> int | None:
    """Return a child's exit status, or minus the signal that ended it; None: it runs.

    The child is not reaped, because until then its number also names its process group.
    """
    if process.returncode is not None:
        return process.returncode
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _report_end(who: str, code: int) -> int:
    """Print how a process ended; return its status in a shell's form."""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    say(f"{who} has ended {how}, so msrun ends the others")
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()
