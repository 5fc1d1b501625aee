"""msrun as a rank: Rekindle's agent in the place of TaskD's.

    rekindle run --no-python --nnodes N python -m rekindle.training.msrun [options] script ...

msrun hands its workers over to an agent that it imports by the names of MindCluster's TaskD
(`taskd.api.taskd_agent_api`). Left alone it kills all workers at once when it has seen that one is
gone, and then waits for its scheduler, for 31 s on a CPU; and a scheduler that has lost a worker
serves no new ones there. This agent tells the other workers to end before it kills them, ends the
scheduler, and ends with the broken worker's status. So the job's coordinator starts all nodes'
msruns anew, at a port that was not used before, or elsewhere.

Sources: mindspore/utils/utils.py (RSCPluginHandle) and mindspore/parallel/cluster of MindSpore
2.10.0; the times are measured.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from rekindle.errors import RekindleError, UsageError
from rekindle.training import msrun_worker

LOOK_S = 0.1
GRACE_S = 8.0  # for workers that are told to end
SCHEDULER_S = 60.0  # for the scheduler, once all workers are done
# With any of them msrun asks for an agent; RSC asks for nothing else.
_ASKING = ("TTP:1", "UCE:1", "ARF:1", "TSP:1", "HCCE:1", "RSC:1")


def main() -> None:
    """Run msrun with its own options, and with what the job knows about nodes by default."""
    try:
        defaults = options_of(os.environ)
    except UsageError as error:
        sys.exit(f"rekindle: {error}")
    os.environ |= environment_of(os.environ)
    sys.argv[1:1] = defaults
    agent = Agent()
    if importlib.util.find_spec("taskd") is None:  # else its own agent is what the user wants
        sys.modules |= agent.modules()
    from mindspore.parallel.cluster.run import get_args, run

    args = get_args()
    if args.worker_num == 0:
        args.worker_num = args.local_worker_num * int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    # With this Python, not with the first one of the PATH, which msrun would take.
    python = [sys.executable] if args.task_script.endswith(".py") else []
    args.task_script_args = [*python, args.task_script, *args.task_script_args]
    args.task_script = msrun_worker.__file__
    run(args)


def options_of(environment: Mapping[str, str]) -> list[str]:
    """Return msrun's options as the job knows them; those of the command line come after them.

    worker_num is 0 there: as many as on this node, times the nodes. Raises UsageError: there are
    several msruns on a node.
    """
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"there are {environment['LOCAL_WORLD_SIZE']} msruns on this node: give "
            "--nproc-per-node 1 to rekindle, and --local_worker_num to msrun"
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


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what msrun and its workers need besides: that an agent is asked for, above all."""
    asked = environment.get("MS_ENABLE_TFT", "")
    if not any(each in asked for each in _ASKING):
        asked = "{" + ", ".join([*filter(None, [asked.strip(" {}")]), "RSC:1"]) + "}"
    return {
        "MS_ENABLE_TFT": asked,
        # By default they wait 3 to 5 s before they look for the scheduler again.
        "MS_RETRY_INTERVAL_LOWER": environment.get("MS_RETRY_INTERVAL_LOWER", "1"),
        "MS_RETRY_INTERVAL_UPPER": environment.get("MS_RETRY_INTERVAL_UPPER", "1"),
        msrun_worker.ENV_MSRUN: str(os.getpid()),
    }


class Agent:
    """Starts msrun's workers by its callbacks, and stays until they have ended."""

    def __init__(self) -> None:
        self._callbacks: dict[str, Callable[..., Any]] = {}
        self._told: signal.Signals | None = None  # to end, by whoever started msrun

    def modules(self) -> dict[str, types.ModuleType]:
        """Return the modules that msrun imports."""
        names = ("taskd", "taskd.api", "taskd.api.taskd_agent_api")
        found = {name: types.ModuleType(name) for name in names}
        vars(found[names[-1]]).update(
            init_taskd_agent=lambda config: config == {"Framework": "MindSpore"},
            register_func=self._callbacks.__setitem__,
            start_taskd_agent=self.start,
        )
        return found

    def start(self) -> None:
        """Start all workers, wait, and end what is left. Raises SystemExit: not all ended well."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        schedulers = psutil.Process().children()  # msrun has started it where it belongs
        workers: dict[int, int] = {}
        try:
            if self._callbacks["START_ALL_WORKER"]() != 0:
                raise RekindleError("a worker ended as soon as msrun had started it")
            state = self._callbacks["MONITOR"]([-1])
            workers = {each["global_rank"]: each["pid"] for each in state.values()}
            status = self._watch(workers, schedulers)
        finally:
            self._end([*workers.values()], schedulers)
        if status != 0:
            sys.exit(status)

    def _on_signal(self, number: int, _: object) -> None:
        self._told = signal.Signals(number)

    def _watch(self, workers: Mapping[int, int], schedulers: Sequence[psutil.Process]) -> int:
        """Return a status as a shell would have it: of the first that did not end well, or 0."""
        done_at: float | None = None
        while self._told is None:
            ends = {rank: _end_of(pid) for rank, pid in workers.items()}
            for rank, code in ends.items():
                if code:
                    return _said(f"worker {rank} (process {workers[rank]})", code)
            for each in schedulers:
                code = _end_of(each.pid)
                if code:
                    return _said(f"the scheduler (process {each.pid})", code)
            if all(code == 0 for code in ends.values()):
                done_at = done_at or time.monotonic()
                if all(_end_of(each.pid) == 0 for each in schedulers):
                    return 0
                if time.monotonic() - done_at > SCHEDULER_S:
                    print("rekindle: the scheduler did not end by itself", file=sys.stderr)
                    return 0
            time.sleep(LOOK_S)
        return 128 + self._told

    def _end(self, workers: Sequence[int], schedulers: Sequence[psutil.Process]) -> None:
        """Tell workers to end, kill those that do not in time, and the scheduler."""
        for pid in workers:
            if _end_of(pid) is None:
                os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(_end_of(pid) is None for pid in workers):
            time.sleep(LOOK_S)
        self._callbacks["KILL_WORKER"]([-1])
        for each in schedulers:
            if each.is_running():
                each.kill()


def _end_of(pid: int) -> int | None:
    """Return a child's exit status, negative of the signal that ended it; None: it runs.

    It stays to be reaped by msrun, which does not tell by what signal a worker ended.
    """
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _said(who: str, code: int) -> int:
    """Say how it ended; return that as a shell would have it."""
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    print(f"rekindle: {who} has ended {how}; the others are ended", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()
