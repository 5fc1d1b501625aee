"""A node's checkers, seen from its agent: one process for each device during a node check."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rekindle import names
from rekindle.agent.fork_server import Child, Fork
from rekindle.agent.fork_server_process import RunRank
from rekindle.agent.watchdog import OomCounter
from rekindle.errors import RekindleError
from rekindle.job.spec import Framework, JobSpec
from rekindle.protocol.node_check import (
    CheckAlone,
    Checked,
    CheckerAnswer,
    CheckOver,
    CheckPair,
    CheckReady,
    CheckStop,
    DeviceWork,
    Done,
    Meet,
    Open,
    Task,
)
from rekindle.protocol.rank import Message
from rekindle.recovery.faults.fault import Exit
from rekindle.recovery.node_check.evidence import KILLED, Measurement, lacks_memory
from rekindle.supervised import in_background

_SOON_S = 0.5  # between the errors of a collective's devices
_MODULES = {
    Framework.TORCH: "rekindle.training.node_check.torch_checker",
    Framework.MINDSPORE: "rekindle.training.node_check.numpy_checker",
}
_ANSWERS: msgspec.msgpack.Decoder[CheckerAnswer] = msgspec.msgpack.Decoder(CheckerAnswer)


class CheckerError(RekindleError):
    """A checker has failed or ended. device: its number on the node."""

    def __init__(self, device: int, text: str) -> None:
        super().__init__(text)
        self.device = device


class Checker:
    """The process of one checker."""

    def __init__(self, device: int, child: Child, oom: OomCounter) -> None:
        self.device = device
        self._oom = oom
        self._child = child
        self._answers: asyncio.Queue[CheckerAnswer | None] = asyncio.Queue()
        self._end = ""
        child.watch(lambda data: self._answers.put_nowait(_ANSWERS.decode(data)), self._ended)

    async def ask(self, task: Task) -> Done:
        """Send it a task; return its result. Raises CheckerError: it failed or ended."""
        if not self._end:
            with contextlib.suppress(ConnectionError):  # it is about to end
                self._child.connection.send(msgspec.msgpack.encode(task))
        while True:
            answer = await self._next_answer()
            if isinstance(answer, Done) and answer.serial == task.serial:
                if answer.error:
                    raise CheckerError(self.device, answer.error)
                return answer

    async def open(self) -> int:
        """Wait until it can work; return the port of its store. Raises CheckerError: it fails."""
        answer = await self._next_answer()
        if isinstance(answer, Open):
            return answer.port
        raise CheckerError(self.device, answer.error)

    async def _next_answer(self) -> CheckerAnswer:
        answer = await self._answers.get()
        if answer is None:
            self._answers.put_nowait(None)
            raise CheckerError(self.device, f"its process ended with {self._end}")
        return answer

    def kill(self) -> None:
        """Kill it and its children; the agent reaps it after its end."""
        if not self._end:
            self._child.signal(signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until it has ended."""
        with contextlib.suppress(CheckerError):
            while True:
                await self._next_answer()

    def _ended(self, exit_: Exit) -> None:
        self._end = str(exit_)
        if exit_.signal == signal.SIGKILL and self._oom.killed_lately(time.monotonic()):
            self._end += f", {KILLED}"
        self._answers.put_nowait(None)


class NodeCheckRunner:
    """All checkers of a node. They start with the first task, and again after one has failed.

    fork: forks a process from the fork server. environment: the agent's, for ranks. streams:
    returns standard output and error for checkers.
    """

    def __init__(
        self,
        spec: JobSpec,
        fork: Fork,
        send: Callable[[Message], None],
        environment: dict[str, str],
        streams: Callable[[], tuple[int, int]],
    ) -> None:
        self._spec, self._fork, self._send = spec, fork, send
        self._streams = streams
        self._environment = environment
        self._checkers: list[Checker] = []
        self._port = 0
        self._oom = OomCounter()
        self._serial = 0  # the serial number of the running check
        self._work: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, order: Message) -> None:
        """Carry out an order; a check runs as a task beside the agent's other work."""
        match order:
            case CheckAlone() | CheckPair():
                self._serial = order.serial
                self._work = in_background(self._check(order, self._work), self._tasks)
            case CheckStop(serial=serial) if serial == self._serial:
                self._kill()
            case CheckOver():
                await self.end()

    async def end(self) -> None:
        """End all checkers, and wait until their devices are free."""
        self._serial = 0
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
            self._work = None
        await self._give_up()

    async def _give_up(self) -> None:
        """End the existing checkers."""
        self._kill()
        gone = [checker.gone() for checker in self._checkers]
        self._checkers = []
        with contextlib.suppress(asyncio.TimeoutError):  # the kernel may keep one alive
            await asyncio.wait_for(asyncio.gather(*gone), names.KILLED_S)

    def _kill(self) -> None:
        for checker in self._checkers:
            checker.kill()

    async def _check(
        self, order: CheckAlone | CheckPair, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._oom.look(time.monotonic())  # earlier kills do not count
        try:
            if not self._checkers:
                await self._start()
            if isinstance(order, CheckPair):
                done = await self._pair(order)
            else:
                done = await self._alone(order)
            answer = Checked(serial=order.serial, seconds=done.seconds, note=done.note)
        except CheckerError as error:
            answer = Checked(serial=order.serial, error=str(error), device=error.device)
        except (RekindleError, OSError) as error:
            answer = Checked(
                serial=order.serial,
                error=f"the agent cannot start a process for the node check: {error}",
            )
        if answer.error:
            # The other checkers may still wait for the failed one, so all of them end. If the next
            # ones cannot start, their first task reports it.
            await self._give_up()
            with contextlib.suppress(RekindleError, OSError):
                await self._start()
        self._send(answer)

    async def _start(self) -> None:
        try:
            for device in range(self._spec.processes_per_node):
                self._checkers.append(await self._start_one(device))
            ports = await asyncio.gather(*(checker.open() for checker in self._checkers))
        except BaseException:
            await self._give_up()
            raise
        self._port = ports[0]
        self._send(CheckReady(port=self._port))

    async def _start_one(self, device: int) -> Checker:
        logs = Path(self._spec.log_directory)
        request = RunRank(
            kind="module",
            target=_MODULES[self._spec.framework],
            arguments=(),
            environment=self._environment
            | self._spec.environment
            | {
                "LOCAL_RANK": str(device),
                "LOCAL_WORLD_SIZE": str(self._spec.processes_per_node),
                names.ENV_JOB_ID: self._spec.job_id,
                names.ENV_STACK_FILE: str(logs / f"check-{os.getpid()}-{device}.stacks"),
            },
            working_directory="/",
        )
        # A checker has no heartbeat page, so any descriptor works.
        stdout, stderr = self._streams()
        fds = [stdout, stdout, stderr]
        return Checker(device, await self._fork(request, fds), self._oom)

    async def _alone(self, order: CheckAlone) -> Done:
        work = DeviceWork(serial=order.serial, beside_ranks=order.beside_ranks)
        done = await self._ask(lambda device: work)
        if len(self._checkers) > 1:
            meet = functools.partial(self._meet, order, Measurement.LOCAL_LINK, names.LOOPBACK)
            met = await self._ask(lambda device: meet(self._port, device))
            done = msgspec.structs.replace(done, seconds=done.seconds | met.seconds)
        return done

    async def _pair(self, order: CheckPair) -> Done:
        first = order.place * len(self._checkers)
        meet = functools.partial(self._meet, order, Measurement.LINK, order.host, order.port)
        return await self._ask(lambda device: meet(first + device, nodes=2))

    def _meet(
        self,
        order: CheckAlone | CheckPair,
        part: Measurement,
        host: str,
        port: int,
        rank: int,
        nodes: int = 1,
    ) -> Meet:
        return Meet(
            serial=order.serial,
            beside_ranks=order.beside_ranks,
            part=part,
            host=host,
            port=port,
            rank=rank,
            world_size=nodes * len(self._checkers),
            timeout_s=self._spec.node_check.timeout_s,
        )

    async def _ask(self, task: Callable[[int], Task]) -> Done:
        """Send a task to all checkers at the same time; the slowest one counts.

        Raises CheckerError: the error of the first one that failed. If another one reports soon
        afterwards that memory ran out, its error counts, because a collective fails on all its
        devices.
        """
        asked = [checker.ask(task(checker.device)) for checker in self._checkers]
        tasks = [asyncio.ensure_future(each) for each in asked]
        try:
            ended, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            soon = (await asyncio.wait(late, timeout=_SOON_S))[0] if late else ()
            errors = [error for each in (*ended, *soon) if (error := each.exception())]
            if errors:
                raise min(errors, key=lambda error: not lacks_memory(str(error)))
            done = [each.result() for each in tasks]
        finally:
            for each in tasks:
                each.cancel()
        seconds = {part: max(each.seconds[part] for each in done) for part in done[0].seconds}
        notes = dict.fromkeys(each.note for each in done if each.note)
        return Done(serial=done[0].serial, seconds=seconds, note="; ".join(notes))
