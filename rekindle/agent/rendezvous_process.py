"""The process of the ranks' store, or of their scheduler, seen from the agent of its node.

MindSpore forms its collectives through a scheduler. On CPU a scheduler serves one set of processes
only, and processes cannot meet again after an interrupted collective. So each start of all ranks
has a new scheduler, at a new port; PyTorch's ranks have a new store.

Sources of MindSpore's names: mindspore/python/mindspore/parallel/cluster (2.10), and the strings of
its libraries.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.agent.fork_server import Child, Fork
from rekindle.agent.fork_server_process import ForkOrder, RunScheduler, RunStore, free_port
from rekindle.agent.threads import in_thread
from rekindle.console import say
from rekindle.errors import RekindleError
from rekindle.job.spec import EntryKind, Framework, JobSpec
from rekindle.protocol import agent as protocol

Send = Callable[[protocol.Message], None]

# Agents find ranks that end, and the gate finds ranks that hang. MindSpore must not give up before
# them. Its default limits (30 s) would also end ranks that compile for longer than others.
PATIENCE_S = 1800


def worker_environment(
    spec: JobSpec, spawn: protocol.Spawn, rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return MindSpore's variables for a rank. environment: the rank's other variables."""
    return {
        **scheduler_environment(spec, environment),
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": spawn.store_host,
        "MS_SCHED_PORT": str(spawn.store_port),
        "MS_NODE_ID": str(rank),
        "RANK_ID": str(rank),
        "RANK_SIZE": str(spec.world_size),
        "DEVICE_ID": str(rank % spec.processes_per_node),
    }


def scheduler_environment(spec: JobSpec, environment: Mapping[str, str]) -> dict[str, str]:
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


async def start_store(
    spec: JobSpec,
    order: protocol.HostStore,
    fork: Fork,
    send: Send,
    environment: Mapping[str, str],
) -> StoreProcess | None:
    """Start the ranks' store or scheduler, and report its port; None: no process runs.

    environment: that of the agent.
    """
    if spec.entry is EntryKind.PROGRAM:
        port, error = free_port(order.port)
        send(protocol.StoreUp(serial=order.serial, port=port, error=error))
        return None
    what: ForkOrder = RunStore(port=order.port)
    if spec.framework is Framework.MINDSPORE:
        own = scheduler_environment(spec, environment)
        what = RunScheduler(
            port=order.port,
            environment={**environment, **own, "MS_ROLE": "MS_SCHED"},
            log=str(Path(spec.log_directory, f"scheduler_{order.serial}.log")),
        )
    try:
        child = await fork(what, [])
    except (RekindleError, OSError) as error:
        send(protocol.StoreUp(serial=order.serial, port=0, error=str(error)))
        return None
    return StoreProcess(child, order, send)


class StoreProcess:
    """The process of the ranks' store or of their scheduler. The fork server forks it.

    pid: of the process. restart: the first restart whose ranks use it; None: no ranks use it yet.
    """

    def __init__(self, child: Child, order: protocol.HostStore, send: Send) -> None:
        self.pid, self._connection = child.pid, child.connection
        self._order, self._send = order, send
        self._answered = False
        self._port = 0  # 0: it does not listen
        self.restart: int | None = None
        asyncio.get_running_loop().add_reader(self._connection, self._readable)

    def live(self, restart: int) -> protocol.LiveStore | None:
        """Return its port if it listens and serves the ranks of this restart; None: otherwise.

        If ranks cannot join others, each restart has its own store.
        """
        if self._port == 0 or self.restart not in (None, restart):
            return None
        return protocol.LiveStore(serial=self._order.serial, port=self._port)

    def _readable(self) -> None:
        try:
            data = self._connection.recv(4096)
        except ConnectionError:
            data = b""
        if data:
            answer = msgspec.msgpack.decode(data)
            self._answered, self._port = True, answer["port"]
            self._send(protocol.StoreUp(serial=self._order.serial, **answer))
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        self._port = 0
        if self._answered:
            self._send(protocol.StoreDown(serial=self._order.serial))
        else:
            text = "the process of the ranks' store ended before it opened its port"
            self._send(protocol.StoreUp(serial=self._order.serial, port=0, error=text))

    async def end(self) -> None:
        """End the process and reap it. A scheduler may hang in a write to its log."""
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
            await asyncio.wait_for(in_thread(os.waitpid, self.pid, 0), names.KILLED_S)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has ended and is reaped
        except asyncio.TimeoutError:
            say(f"process {self.pid} of the ranks' store did not end after SIGKILL")
