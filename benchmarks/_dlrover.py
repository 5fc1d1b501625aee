"""Launch a job of DLRover: its master for one machine, and dlrover-run with the same script.

The arguments are those of _rank_plain.py. This script starts the master, because dlrover-run 0.6.1
cannot start it with torch 2.13 (SubprocessHandler needs numa_options).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from _common import HERE, RANKS

JOB = "benchmark"


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    master = [sys.executable, "-m", "dlrover.python.master.main", "--platform", "local"]
    master += ["--port", port, "--node_num", "1", "--job_name", JOB]
    children = [subprocess.Popen(master)]
    environment = os.environ | {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": JOB}
    ranks = [str(Path(sys.executable).parent / "dlrover-run"), "--nnodes", "1"]
    ranks += ["--nproc-per-node", str(RANKS), "--max-restarts", "1000"]
    ranks += [str(HERE / "_rank_plain.py"), *sys.argv[1:]]
    children.append(subprocess.Popen(ranks, env=environment))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        children[1].wait()
    finally:
        for child in reversed(children):
            child.terminate()


if __name__ == "__main__":
    main()
