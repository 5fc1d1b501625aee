"""Launch a job of torchft: its lighthouse, and each rank as its own replica group.

The arguments are those of _rank_torchft.py. torchrun starts each replica group, and starts it again
when it ends, as in torchft's own examples. The lighthouse treats a silent replica as lost after one
second instead of five, which gives torchft an advantage.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from _common import HERE, RANKS

SILENT_MS = 1000


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    beside = Path(sys.executable).parent
    lighthouse = [beside / "torchft_lighthouse", "--min_replicas", "2", "--bind", f"[::]:{port}"]
    lighthouse += ["--heartbeat_timeout_ms", str(SILENT_MS), "--join_timeout_ms", str(SILENT_MS)]
    children = [subprocess.Popen(list(map(str, lighthouse)))]
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    rank = [beside / "torchrun", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1000"]
    rank += [HERE / "_rank_torchft.py", *sys.argv[1:]]
    for number in range(RANKS):
        own = environment | {"REPLICA_GROUP_ID": str(number)}
        children.append(subprocess.Popen(list(map(str, rank)), env=own))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for child in children[1:]:
            child.wait()
    finally:
        for child in children:
            child.terminate()


if __name__ == "__main__":
    main()
