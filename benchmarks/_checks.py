"""Measure how long jobs take to start with and without a node check: Rekindle and DLRover."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _common import HERE

NODES = 2
LIMIT_S = 240.0


def started(folder: Path, dlrover: Path | None, *, check: bool) -> float:
    """Return the seconds from the command to the first line of the last rank on two nodes.

    dlrover: the folder of DLRover's programs; None: Rekindle.
    """
    folder.mkdir()
    (folder / "came").mkdir()
    script = [str(HERE / "_rank_hello.py"), str(folder / "came")]
    flags = ["--network-check"] if check else []
    began = time.time()
    with (folder / "output").open("w") as output:
        if dlrover is None:
            command = [sys.executable, "-m", "rekindle.cli.main", "run", *flags]
            command += ["--nnodes", str(NODES), "--nproc-per-node", "1", *script]
            environment = os.environ | {"REKINDLE_HOME": str(folder)}
            _run([(command, environment)], output)
        else:
            _run_dlrover(dlrover, flags, script, folder, output)
    came = [float(path.read_text()) for path in (folder / "came").iterdir()]
    if len(came) != NODES:
        raise SystemExit(f"not all ranks came:\n{(folder / 'output').read_text()[-3000:]}")
    return max(came) - began


def _run_dlrover(
    programs: Path, flags: list[str], script: list[str], folder: Path, output: object
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    python = str(programs / "python")
    master = [python, "-m", "dlrover.python.master.main", "--platform", "local"]
    master += ["--port", port, "--node_num", str(NODES), "--job_name", "check"]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["PATH"] = f"{programs}:{clean['PATH']}"
    serving = subprocess.Popen(master, env=clean, stdout=output, stderr=output)
    try:
        launch = [str(programs / "dlrover-run"), *flags, "--nnodes", str(NODES)]
        launch += ["--nproc-per-node", "1", *script]
        nodes = []
        for node in range(NODES):
            own = folder / f"tmp{node}"  # otherwise both write their times to one fixed path
            own.mkdir()
            named = {"NODE_RANK": str(node), "NODE_ID": str(node), "NODE_NUM": str(NODES)}
            named |= {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": "check"}
            nodes.append((launch, clean | named | {"TMPDIR": str(own)}))
        _run(nodes, output)
    finally:
        serving.terminate()
        serving.wait(30)


def _run(commands: list[tuple[list[str], dict[str, str]]], output: object) -> None:
    running = [
        subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        for command, environment in commands
    ]
    try:
        for each in running:
            each.wait(LIMIT_S)
    finally:
        for each in running:
            each.terminate()
            each.wait(30)


def compared(folder: Path, dlrover: Path, turns: int) -> dict[str, object]:
    """Run both in turn, with and without a check; the difference is the time of the check."""
    seconds: dict[str, list[float]] = {}
    for turn in range(turns):
        for name, programs in (("rekindle", None), ("dlrover", dlrover)):
            for check in (False, True):
                key = f"{name}{' checked' * check}"
                here = folder / f"{key.replace(' ', '-')}-{turn}"
                seconds.setdefault(key, []).append(started(here, programs, check=check))
                print(f"{key}: {seconds[key][-1]:.1f} s", flush=True)
    took = {key: statistics.median(each) for key, each in seconds.items()}
    net = {name: took[f"{name} checked"] - took[name] for name in ("rekindle", "dlrover")}
    return {
        "start_s": {key: round(each, 2) for key, each in took.items()},
        "check_s": {name: round(each, 2) for name, each in net.items()},
        "dlrover_ratio": round(net["rekindle"] / net["dlrover"], 3),
    }
