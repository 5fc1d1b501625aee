"""A rank's process, seen from its agent: environment, connection, heartbeat page and error file."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import re
import signal
import socket
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.agent.fork_server import Child
from rekindle.agent.threads import Problems
from rekindle.console import say
from rekindle.errors import ProtocolError
from rekindle.job.spec import EntryKind, JobSpec
from rekindle.protocol import agent as protocol
from rekindle.protocol.heartbeat_page import HeartbeatPage, StateDigest
from rekindle.rank.progress import numbers_in
from rekindle.recovery.faults.fault import ErrorRecord, Exit

_PACKAGES = (b"rekindle", b"mindio_ttp")
# A statement that imports one of them, in a logical line of tokens with spaces between them.
_IMPORT = re.compile(r"(?:^|[;:] )(?:from |import (?:[^;]* , )?)(?:rekindle|mindio_ttp)\b")


def rank_environment(
    spec: JobSpec,
    spawn: protocol.Spawn,
    *,
    rank: int,
    starts: int,
    logs: Path,
    metrics_file: str,
) -> dict[str, str]:
    """Return the variables that `rank` gets in addition to its agent's environment.

    starts: how often this agent started the rank, including this start. logs: its directory.

    Source of torchrun's names: torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    per_node, world_size = spec.processes_per_node, spawn.world_size
    node, local_rank = divmod(rank, per_node)
    return spec.environment | {
        "RANK": str(spawn.first + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(spawn.first // per_node),
        "GROUP_WORLD_SIZE": str(world_size // per_node),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(spawn.first + local_rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": spawn.store_host,
        "MASTER_PORT": str(spawn.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(spawn.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.policy.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job_id,
        # The ranks' store is ours, also for rank 0. A program that is not Python hosts its own.
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.entry is not EntryKind.PROGRAM),
        "TORCHELASTIC_ERROR_FILE": str(logs / names.ERROR_FILE),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        names.ENV_SCHEDULE_COUNT: str(spawn.placements),
        names.ENV_START_COUNT: str(starts),
        # Generations count on in each attempt.
        names.ENV_FIRST_START: str(int(starts == 1 and spawn.generation == 1)),
        names.ENV_JOB_ID: spec.job_id,
        names.ENV_NODE_RANK: str(node),
        names.ENV_SLOT: str(rank),
        names.ENV_JOINS: str(int(spawn.joins_running_ranks)),
        names.ENV_FULL_WORLD: str(spec.world_size),
        names.ENV_SHRINKS: str(int(spec.least_nodes < spec.nodes)),
        names.ENV_STACK_FILE: str(logs / names.STACK_FILE),
        names.ENV_METRICS_FILE: metrics_file,
        names.ENV_PROFILING: str(Path(spec.directory, names.PROFILING_DIRECTORY)),
        names.ENV_SNAPSHOT_EVERY: str(spec.snapshot_every),
        names.ENV_CHECKPOINT_STORE: spec.checkpoint_store,
    }


def names_session(spec: JobSpec) -> bool:
    """Return whether the job's script imports Rekindle, or MindIO's names. For a thread.

    A script that does not may still have a Session, in another file that it imports.
    """
    folder, target = Path(spec.working_directory), Path(spec.target)
    match spec.entry:
        case EntryKind.PROGRAM:
            return False
        case EntryKind.SCRIPT:
            files = [folder / target]
        case EntryKind.MODULE:
            module = folder.joinpath(*spec.target.split("."))
            files = [module.with_name(f"{module.name}.py"), module / "__main__.py"]
    for file in files:
        with contextlib.suppress(OSError):  # without the file, the start of the rank reports it
            return _imports_rekindle(file.read_bytes())
    return False


def _imports_rekindle(script: bytes) -> bool:
    """Return whether a statement of the script imports Rekindle; comments and texts do not count.

    If Python cannot read the script, the statements before that place count.
    """
    if not any(name in script for name in _PACKAGES):
        return False
    # The start of the rank reports such a script.
    with contextlib.suppress(tokenize.TokenError, SyntaxError, ValueError):
        return any(_IMPORT.search(line) for line in _logical_lines(script))
    return False


def _logical_lines(script: bytes) -> Iterator[str]:
    """Yield the names and operators of each logical line, with a space between them.

    Raises tokenize.TokenError, SyntaxError or ValueError: the script is not Python.
    """
    line: list[str] = []
    for token in tokenize.tokenize(io.BytesIO(script).readline):
        if token.type in (tokenize.NAME, tokenize.OP):
            line.append(token.string)
        elif token.type == tokenize.NEWLINE:
            yield " ".join(line)
            line = []


class RankProcess:
    """A live rank. The event loop calls `on_message(rank, message)` and `on_exit(rank, exit)`.

    logs: the directory of its output, its error file and its stacks.
    """

    def __init__(self, rank: int, child: Child, page: HeartbeatPage, logs: Path) -> None:
        self.rank = rank
        self.page = page
        self._child = child
        self.pid, self.signal = child.pid, child.signal
        self.stack_file = logs / names.STACK_FILE
        self._error_file = logs / names.ERROR_FILE

    def watch(
        self,
        on_message: Callable[[RankProcess, protocol.Message], None],
        on_exit: Callable[[RankProcess, Exit], None],
    ) -> None:
        """Watch the process and its messages; the kernel reports its end."""
        on_data = functools.partial(self._on_data, on_message)
        self._child.watch(on_data, functools.partial(on_exit, self))

    def send(self, message: protocol.Message, fds: list[int] | None = None) -> None:
        """Send to the rank. The agent finds a dead rank by its exit, a silent one by a limit."""
        with contextlib.suppress(ConnectionError, BlockingIOError):
            socket.send_fds(self._child.connection, [protocol.encode(message)], fds or [])

    def error(self) -> ErrorRecord | None:
        """Read the rank's error file, in torchrun's format. For a thread."""
        try:
            record = json.loads(self._error_file.read_text())
            content = record["message"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        details = content if isinstance(content, dict) else {"message": content}
        extra = details.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        return ErrorRecord(
            message=_text(details.get("message", "")),
            traceback=_text(extra.get("py_callstack", "")),
            at=_number(extra.get("timestamp")),
            text_of_script=record.get(names.TEXT_OF_SCRIPT) is True,
        )

    def _on_data(
        self, on_message: Callable[[RankProcess, protocol.Message], None], data: bytes
    ) -> None:
        try:
            message = protocol.decode_from_rank(data)
            if message.ranks_named != (self.rank,):
                raise ProtocolError("it sent a message for another rank")
        except ProtocolError as error:
            # A script that writes to our descriptor has broken its connection. The agent can only
            # end it.
            say(f"rank {self.rank}: {error}")
            self.signal(signal.SIGKILL)
        else:
            on_message(self, message)


class HeartbeatPages:
    """The heartbeat pages of a node's ranks. The page of a rank outlives the rank's processes."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._pages: dict[int, tuple[int, HeartbeatPage]] = {}
        self._problems = Problems()
        self._unreadable = b""  # the last record, if the agent could not read it
        self._sent: dict[int, int] = {}  # the digests of each rank that the coordinator has

    def of(self, rank: int) -> tuple[int, HeartbeatPage]:
        """Return the rank's page, and the descriptor of its memory."""
        if rank not in self._pages:
            fd = HeartbeatPage.create(f"{self._job_id}-heartbeat{rank}")
            self._pages[rank] = fd, HeartbeatPage(fd)
        return self._pages[rank]

    @property
    def every(self) -> list[HeartbeatPage]:
        """The pages of all ranks that this node has started."""
        return [page for _, page in self._pages.values()]

    def beat(self, live: Iterable[int], ready: Iterable[int]) -> protocol.Heartbeat:
        """Return the progress on the pages of live ranks.

        It includes the finished steps of the ranks that are ready: they have reported their state
        in this generation. Until then a page may show the steps of an earlier generation.
        """
        pages = {rank: self._pages[rank][1] for rank in sorted(live)}
        first = next(iter(pages.values()), None)
        return protocol.Heartbeat(
            finished={rank: pages[rank].finished or 0 for rank in sorted(ready)},
            total=first.total if first else 0,
            metrics=self._metrics(first) if first else {},
            digests={rank: new for rank in pages if (new := self.new_digests(rank))},
        )

    def new_digests(self, rank: int) -> tuple[StateDigest, ...]:
        """Return the digests on the rank's page since the last call: the caller sends them."""
        if rank not in self._pages:
            return ()
        self._sent[rank], new = self._pages[rank][1].digests_after(self._sent.get(rank, 0))
        return new

    def agreed(self, step: int, *, at_most: bool = False) -> None:
        """Show all ranks the newest step after which they agreed. at_most: an older one stays."""
        for page in self.every:
            page.agreed(min(step, page.compared[1]) if at_most else step)

    def send_again(self) -> None:
        """Return all digests again, for another coordinator."""
        self._sent = {}

    def _metrics(self, page: HeartbeatPage) -> dict[str, float]:
        """Return the numbers of the newest step record on a page.

        A record that its rank is writing is incomplete. It is unreadable only once.
        """
        record, before = page.last_record(), self._unreadable
        self._unreadable = b""
        try:
            return numbers_in(record) if record else {}
        except ProtocolError as error:
            self._unreadable = record
            if record == before:
                self._problems.report("record", f"the agent cannot read a step record: {error}")
            return {}

    def close(self) -> None:
        """Release the memory of the pages."""
        for fd, page in self._pages.values():
            page.close()
            os.close(fd)


def with_local_progress(
    over: protocol.GenerationEnded, pages: Iterable[HeartbeatPage]
) -> protocol.GenerationEnded:
    """Return the order with the steps that can still end on this node.

    pages: of all ranks of the node. They are newer than the coordinator's knowledge. A rank that
    updates its model has all gradients of its step.
    """
    finished = max(((page.finished or 0) + page.in_update for page in pages), default=0)
    return msgspec.structs.replace(over, finished=max(over.finished, finished))


def _text(value: object) -> str:
    """Return a value of the error file as text that UTF-8 can encode."""
    return str(value).encode(errors="backslashreplace").decode()


def _number(text: object) -> float:
    try:
        number = float(str(text))
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
