"""The job's own scheduler, through which MindSpore's ranks meet, and the ranks' variables for it.

MindSpore forms its collectives through a scheduler. On CPU a scheduler serves one set of processes
only, and processes cannot meet again after an interrupted collective. So each start of all ranks
has a new scheduler, at a new port; PyTorch's ranks have a new store.

Sources of the names: mindspore/python/mindspore/parallel/cluster (2.10), and the strings of its
libraries.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rekindle.job.spec import JobSpec
from rekindle.protocol.agent import HostStore, Spawn

# Agents find ranks that end, and the gate finds ranks that hang. MindSpore must not give up before
# them. Its default limits (30 s) would also end ranks that compile for longer than others.
PATIENCE_S = 1800


class RunScheduler(msgspec.Struct, frozen=True, kw_only=True, tag="scheduler"):
    """Become MindSpore's scheduler. log: the file for its output.

    port: 0: any free one.
    """

    port: int
    environment: dict[str, str]
    log: str


def scheduler_order(
    spec: JobSpec, order: HostStore, environment: Mapping[str, str]
) -> RunScheduler:
    """Return the order that starts the scheduler. environment: that of the agent."""
    return RunScheduler(
        port=order.port,
        environment={**environment, **_common(spec, environment), "MS_ROLE": "MS_SCHED"},
        log=str(Path(spec.log_directory, f"scheduler_{order.serial}.log")),
    )


def worker_environment(
    spec: JobSpec, spawn: Spawn, rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return MindSpore's variables for a rank. environment: the rank's other variables."""
    return {
        **_common(spec, environment),
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": spawn.store_host,
        "MS_SCHED_PORT": str(spawn.store_port),
        "MS_NODE_ID": str(rank),
        "RANK_ID": str(rank),
        "RANK_SIZE": str(spec.world_size),
        "DEVICE_ID": str(rank % spec.processes_per_node),
    }


def _common(spec: JobSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the common variables of scheduler and ranks; the user's own limits have priority."""
    limits = {
        "MS_TOPO_TIMEOUT": str(round(spec.policy.join_timeout_s)),
        "MS_CPU_COMM_OP_TIMEOUT": str(PATIENCE_S),
        "MS_NODE_TIMEOUT": str(PATIENCE_S),
        # By default they wait 3 to 5 s before they search for the scheduler again.
        "MS_RETRY_INTERVAL_LOWER": "1",
        "MS_RETRY_INTERVAL_UPPER": "1",
    }
    return {
        **{name: environment.get(name, value) for name, value in limits.items()},
        "MS_WORKER_NUM": str(spec.world_size),
        "MS_LOCAL_WORKER": str(spec.processes_per_node),
    }


def free_port(wanted: int) -> tuple[int, str]:
    """Find a port for a server that another library starts: `wanted`, or any if that is 0."""
    with socket.socket() as probe:
        try:
            probe.bind(("", wanted))
        except OSError as error:
            return 0, f"port {wanted}: {error.strerror}"
        return probe.getsockname()[1], ""


def host_scheduler(channel: socket.socket, order: RunScheduler) -> None:
    """Run the scheduler until the agent ends this process; first send the port (or the error)."""
    port, error = free_port(order.port)
    channel.send(msgspec.msgpack.encode({"port": port, "error": error}))
    if error:
        os._exit(1)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.clear()
    os.environ.update(order.environment, MS_SCHED_HOST="0.0.0.0", MS_SCHED_PORT=str(port))
    from mindspore.communication import init  # ranks wait until it listens

    init()  # it returns, or exits, after the end of all ranks
    os._exit(0)
