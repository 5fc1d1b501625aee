"""Faults that the training script causes in its own process, at an exact place of an exact step.

A test writes the faults to a file in the folder of the run. A rank reads the file when it starts,
and causes a fault when it reaches the named place (`Injector.at`). Each fault occurs once, unless
it is marked `again`. After the first step of a generation, a rank that can read the job's journal
causes a fault only when the coordinator has closed the last incident; a fault that came earlier
would join that incident.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from waiting import bound_s

from rekindle.protocol.rank import StepDone
from rekindle.training.devices import CpuDevice, Damage

PAUSE_LIMIT_S = 600.0  # much longer than the bounds of tests, which end their ranks themselves
_FILE = "faults.json"
_DAMAGE = {"uce": Damage.STATE, "uce-temporary": Damage.NONE, "uce-fatal": Damage.DEVICE}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of `rank` at a place of the script.

    `step`: only in this step, or None for each step.
    `life`: only in the n-th process of the rank. 0 means each process, -1 none.
    `do`: the action, see below.
    `again`: whether the fault occurs at each pass of the place, instead of once.
    `after`: only after the fault that is this number of places earlier in the list. 0 means no
    condition.

    The values of `do`:

    `kill`, `segv`, `abrt`, `stop`: The process gets this signal.
    `raise`: The script raises an error.
    `raise together`: The same, once all ranks with this fault have reached it.
    `link`: A library raises an error with the text of a broken link.
    `wrapped`: The script catches such an error and raises its own error from it.
    `hiccup`: The script raises an error that it declares as transient.
    `worker`: A worker of the script's loader gets SIGKILL; the process sleeps.
    `hang`: The process sleeps forever.
    `exit`: The process exits with status 3.
    `uce`: A memory error of the device damages the state.
    `uce-temporary`: A memory error of the device has no lasting effect.
    `uce-fatal`: A memory error damages the device permanently.
    `flip`: The rank computes wrong values after it.
    `ecc`: A library raises the error that reports a `flip` late.
    `pause`: The rank waits until the test releases it.
    `compute`: The rank computes until the test releases it.
    `hold`: The rank waits until the agent asks it to pause for a growing world.
    `over`: The rank waits until the agent reports the end of this generation.
    `leave`: The script leaves its loop, as after an early stop.
    `nothing`: The fault only records that the rank was here.
    """

    rank: int
    place: str
    step: int | None = None
    life: int = 1
    do: str = "kill"
    again: bool = False
    after: int = 0


def held(fault: Fault) -> tuple[Fault, Fault]:
    """Return a pause and the fault at the same place."""
    return dataclasses.replace(fault, do="pause"), fault


def write_faults(
    folder: Path, faults: list[Fault], *, keep: bool = False, journal: Path | None = None
) -> None:
    """Prepare the folder of a run with the faults of its ranks.

    `keep`: whether to keep the marks of faults that have occurred.
    `journal`: the file that the coordinator writes, if the ranks can read it.
    """
    (folder / "processes").mkdir(parents=True, exist_ok=True)
    for mark in () if keep else folder.glob("*-fault-*"):
        mark.unlink()
    plan = {
        "journal": str(journal) if journal is not None else None,
        "faults": [dataclasses.asdict(fault) for fault in faults],
    }
    (folder / _FILE).write_text(json.dumps(plan))


def reached(folder: Path, number: int) -> Path:
    """Return the file that appears when fault `number` occurs."""
    return folder / f"reached-fault-{number}"


def release(folder: Path, number: int) -> None:
    """Let a rank that pauses at fault `number` continue."""
    (folder / f"release-fault-{number}").touch()


class HiccupError(Exception):
    """An error that the script's Session declares as transient."""


def _own_error(what: str, text: str) -> Exception:
    # The text looks like that of a library.
    return HiccupError(text) if what == "hiccup" else RuntimeError(f"NCCL error in table: {text}")


def _library_raises(text: str) -> None:
    """Raise a RuntimeError as a library does: not by a `raise` statement of the script."""
    future = concurrent.futures.Future[None]()
    future.set_exception(RuntimeError(text))
    future.result()


def _break_link(what: str) -> None:
    try:
        _library_raises("[/gloo/transport/tcp/pair.cc:553] injected")
    except RuntimeError as error:
        if what == "link":
            raise
        raise ValueError("no luck") from error


def _kill_worker(what: str) -> None:
    if what == "worker":
        os.kill(min(child.pid or 0 for child in active_children()), signal.SIGKILL)


class Injector:
    """The faults of one process of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.step: int | None = None
        self.leaves = False
        self.flaw = 0.0  # the error of the model's outputs
        self._flipped_us = 0
        self._channel: Any = None
        self._stepped = -1  # the newest generation whose first step this rank has reported
        self._folder = folder
        plan = json.loads((folder / _FILE).read_text())
        self._journal = Path(plan["journal"]) if plan["journal"] else None
        faults = [Fault(**each) for each in plan["faults"]]
        self._all = faults
        earlier = len(list((folder / "processes").glob(f"{rank}-*")))
        self.life = earlier + 1
        _record(folder / "processes" / f"{rank}-{self.life}", str(os.getpid()))
        mine = [
            (number, fault)
            for number, fault in enumerate(faults)
            if fault.rank == rank and fault.life in (0, self.life)
        ]
        # Records come last. A test can cause another rank's fault as soon as it sees a record, and
        # a fault of this rank that comes after that fault must wait for its next pass.
        self._mine = sorted(mine, key=lambda each: each[1].do == "nothing")

    def at(self, place: str) -> None:
        """Cause the faults that are planned for this place."""
        for number, fault in self._mine:
            if fault.place == place and fault.step in (None, self.step):
                if fault.after and not reached(self._folder, number - fault.after).exists():
                    continue
                mark = reached(self._folder, number)
                first = not mark.exists()
                strikes = fault.do != "nothing" and (first or fault.again)
                if strikes:
                    self._wait_closed()
                if first:
                    _record(mark, "")
                if strikes:
                    self._strike(number, fault.do)

    def _strike(self, number: int, what: str) -> None:
        match what:
            case "raise" | "raise together" | "hiccup":
                self._meet(what)
                raise _own_error(what, f"injected into step {self.step}")
            case "link" | "wrapped":
                _break_link(what)
            case "uce" | "uce-temporary" | "uce-fatal":
                CpuDevice.simulated_damage = _DAMAGE[what]
                _library_raises("UCE ERROR: injected")
            case "leave":
                self.leaves = True
            case "flip":
                self.flaw, self._flipped_us = 5.0, time.time_ns() // 1000
            case "ecc":
                self.flaw, CpuDevice.simulated_damage = 0.0, Damage.STATE
                _library_raises(f"HBM MULTI BIT ECC ERROR. time us= {self._flipped_us}.")
            case "worker" | "hang":
                _kill_worker(what)
                while True:
                    time.sleep(1)
            case "exit":
                os._exit(3)
            case "pause" | "compute":
                release = self._folder / f"release-fault-{number}"
                computes = what == "compute"
                _wait(release.exists, f"nobody released fault {number}", computes=computes)
            case "hold" | "over":
                channel = self._channel
                over = channel._over
                fields = {"hold": lambda: channel._held >= 0, "over": lambda: channel._over > over}
                _wait(fields[what], f"the rank was not told: {what}")
            case _:
                _die(what)

    def _wait_closed(self) -> None:
        """Wait until the journal has the first step of this rank's generation.

        On a busy machine, ranks can be several steps ahead of the coordinator. The wait ends with
        the generation.
        """
        generation, journal = self._stepped, self._journal
        if generation < 0 or journal is None:
            return

        def known() -> bool:
            return self._channel.is_over(generation) or _has_first_step(journal, generation)

        _wait(known, f"no first step of generation {generation} in the journal")

    def _meet(self, what: str) -> None:
        """Wait for the other ranks that raise together, because the first failure ends the job."""
        if what != "raise together":
            return
        marks = [
            reached(self._folder, number)
            for number, fault in enumerate(self._all)
            if (fault.do, fault.step) == (what, self.step)
        ]
        _wait(lambda: all(mark.exists() for mark in marks), "not all ranks came")

    def watch(self, member: Any) -> None:
        """Add fault places to the rank's messages to its agent."""
        if member is None:
            return
        self._channel = channel = member.channel
        say = channel.send

        def send(message: Any) -> None:
            self.at(f"before {type(message).__name__}")
            say(message)
            if isinstance(message, StepDone):
                self._stepped = message.generation
            self.at(f"after {type(message).__name__}")

        channel.send = send

    def watch_runtime(self) -> None:
        """Add fault places to the rank's snapshots and transfers."""
        from rekindle.protocol.snapshot_buffer import SnapshotBuffer
        from rekindle.training.torch import torch_generations
        from rekindle.training.torch.loop import Loop
        from rekindle.training.torch.state.before_step import BeforeStep

        for owner, name, place in (
            (SnapshotBuffer, "commit", "snapshot"),
            (torch_generations, "receive_state", "receive"),
            (BeforeStep, "keep", "keep buffers"),
            (CpuDevice, "wait", "wait"),
            (Loop, "keep", "keep state"),
            (torch_generations, "send_state", "send"),
        ):
            setattr(owner, name, self._before(place, getattr(owner, name)))
        _have_snapshots_sealed()

    def _before(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.at(place)
            return function(*args, **kwargs)

        return wrapped


def _have_snapshots_sealed() -> None:
    """Wait after each snapshot until the agent has sealed it, so that the next one is not skipped.

    Without this, steps of milliseconds would be faster than an agent on a busy machine.
    """
    from rekindle.rank.snapshot_writer import SnapshotWriter

    take = SnapshotWriter.take

    def patient(writer: Any, *args: Any, **kwargs: Any) -> bool:
        taken = take(writer, *args, **kwargs)
        _wait(lambda: all(b.is_sealed for b in writer._buffers if b.state), "nobody seals")
        return taken

    SnapshotWriter.take = patient


def _has_first_step(journal: Path, generation: int) -> bool:
    complete = journal.read_bytes().split(b"\n")[:-1]
    events = (json.loads(line) for line in complete if b'"first-step"' in line)
    return any(event["generation"] >= generation for event in events)


def _record(path: Path, text: str) -> None:
    """Create a file at once, with its text and an exact time to compare with the journal.

    A fault may end this process at any time. The kernel's own times of files come from a clock with
    steps of several milliseconds.
    """
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    unfinished.write_text(text)
    now = time.time_ns()
    os.utime(unfinished, ns=(now, now))
    unfinished.rename(path)


def _wait(true: Callable[[], bool], else_say: str, *, computes: bool = False) -> None:
    deadline = time.monotonic() + bound_s(PAUSE_LIMIT_S)
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(else_say)
        if computes:
            sum(range(100_000))
        else:
            time.sleep(0.002)


def _die(how: str) -> None:
    number = {
        "kill": signal.SIGKILL,
        "segv": signal.SIGSEGV,
        "abrt": signal.SIGABRT,
        "stop": signal.SIGSTOP,
    }[how]
    if number is signal.SIGSEGV:
        ctypes.string_at(0)  # a real segmentation fault
    os.kill(os.getpid(), number)
