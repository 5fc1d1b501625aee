"""One container: it runs a process and restarts it according to its policy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from cluster import clock
from cluster.node import environment, logs, marks
from cluster.node.environment import CannotConfigure

Object = dict[str, Any]

_OOM = "test.rekindle.dev/oom-after"
_BACKOFF_S, _LONGEST_BACKOFF_S, _QUIET_S = 10.0, 300.0, 600.0
_LONGEST_MESSAGE = 4096
# A registry, a path, a tag and a digest.
_REFERENCE = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9/._-]+(:[\w.-]{1,128})?(@sha256:[0-9a-f]{64})?")


class Around(msgspec.Struct, frozen=True):
    """The parts of the pod and the kubelet that a container uses."""

    folder: Path
    root: Path
    mark: str
    scale: float
    variables: Callable[[Object], Coroutine[Any, Any, dict[str, str]]]
    mounts: Callable[[Object], dict[str, str]]
    changed: Callable[[], None]
    event: Callable[[str, str], None]  # reports reason and message of a warning


class Container:
    """The process of a container, and its states in the format of the pod's status."""

    def __init__(self, spec: Object, pod: Object, around: Around, known: Object | None) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.state: Object = {"waiting": {"reason": "ContainerCreating"}}
        self.last_state: Object = {}
        self.restarts = 0
        self.ready = False
        self.ended = asyncio.Event()  # this run has ended
        self.finished = False  # no restart follows
        self._pod = pod
        self._around = around
        self._mark = f"{around.mark}/{self.name}"
        self._id = ""
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._oom = False
        self._lost = known

    @property
    def is_running(self) -> bool:
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        terminated = self.state.get("terminated")
        return None if terminated is None else int(terminated["exitCode"])

    def status(self) -> Object:
        return {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": self.spec.get("image", ""),
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.ready and self.is_running,
            "started": self.is_running,
            "restartCount": self.restarts,
            **({"containerID": self._id} if self._id else {}),
        }

    def log(self, previous: bool = False) -> Path:
        return logs.file_of(self._around.folder, self.name, self.restarts - previous)

    async def run(self) -> None:
        """Run the container until no restart follows."""
        failures = 0
        await self._take_over()
        while not self.finished:
            image = self.spec.get("image", "")
            if image.startswith("missing"):
                await self._pull_in_vain()
            if not _REFERENCE.fullmatch(image):
                await self._wait_for_another_name()
            since = asyncio.get_running_loop().time()
            # A new event, because tasks that wait for the end of the last run may not have run yet.
            self.ended = asyncio.Event()
            terminated = await self._run_once()
            self._set({"terminated": terminated}, ended=True)
            if not self._is_started_again(terminated["exitCode"]):
                break
            if asyncio.get_running_loop().time() - since > _QUIET_S * self._around.scale:
                failures = 0
            await self._back_off(failures, terminated)
            failures += 1
        self.finished = True
        self._around.changed()

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, then SIGKILL after the grace period."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.ended.wait(), grace)
        self.kill()

    def kill(self) -> None:
        self._stopping = True
        marks.sweep(self._mark)

    async def _take_over(self) -> None:
        """Set the result of a run that was lost with its node or with a previous kubelet."""
        known = self._lost
        if known is None or not known.get("containerID"):
            return
        self.restarts = known["restartCount"]
        self._id = known["containerID"]
        self.last_state = known.get("lastState") or {}
        if "terminated" in known["state"]:
            terminated = known["state"]["terminated"]
        else:
            terminated = {
                "exitCode": 137,
                "reason": "ContainerStatusUnknown",
                "message": "The container could not be located when the pod was terminated",
                "containerID": self._id,
            }
        self._set({"terminated": terminated}, ended=True)
        if self._is_started_again(terminated["exitCode"]):
            self.last_state = {"terminated": terminated}
            self.restarts += 1
        else:
            self.finished = True

    async def _run_once(self) -> Object:
        self._id = f"process://{uuid.uuid4().hex}"
        started = clock.stamp()
        message_file = self._message_file()
        output = logs.Pipe(self.log())
        try:
            process = await self._start(message_file, output)
        except CannotConfigure as error:
            output.close()
            return await self._cannot(error)
        except OSError as error:
            output.close()
            return {
                "exitCode": 128,
                "reason": "StartError",
                "message": f"failed to create containerd task: exec: {error}",
                "startedAt": "1970-01-01T00:00:00Z",
                "finishedAt": clock.stamp(),
                "containerID": self._id,
            }
        self._process = process
        if self._stopping:
            self.kill()
        self.ready = "readinessProbe" not in self.spec
        self._set({"running": {"startedAt": started}})
        oom = asyncio.create_task(self._run_out_of_memory())
        try:
            code = await process.wait()
            while marks.sweep(self._mark):
                await asyncio.sleep(0.005)
        finally:
            oom.cancel()
            output.close()
        code = 128 - code if code < 0 else code
        reason = "OOMKilled" if self._oom else "Completed" if code == 0 else "Error"
        self._oom = False
        terminated = {
            "exitCode": code,
            "reason": reason,
            "startedAt": started,
            "finishedAt": clock.stamp(),
            "containerID": self._id,
        }
        message = self._message(message_file, code)
        return {**terminated, "message": message} if message else terminated

    async def _start(self, message_file: Path, output: logs.Pipe) -> asyncio.subprocess.Process:
        around = self._around
        mounts = around.mounts(self.spec)
        own = environment.mounted(await around.variables(self.spec), mounts)
        values = environment.base(self._pod, around.root) | own
        values |= {
            marks.NAME: self._mark,
            "SIMULATED_MOUNTS": msgspec.json.encode(mounts).decode(),
            "TERMINATION_LOG": str(message_file),
        }
        values.setdefault("HOME", str(around.folder))
        words = environment.command(self.spec, values)
        command = list(environment.mounted(dict(enumerate(words)), mounts).values())
        if not command:
            raise FileNotFoundError("no command specified: images have none here")
        message_file.parent.mkdir(parents=True, exist_ok=True)
        message_file.write_bytes(b"")
        return await asyncio.create_subprocess_exec(
            *command,
            env=values,
            cwd=self.spec.get("workingDir") or around.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.end,
            stderr=output.end,
            start_new_session=True,
            preexec_fn=marks.die_with_parent,
        )

    async def _cannot(self, error: CannotConfigure) -> Object:
        """Wait until the missing objects exist, as a kubelet does, and then run the container."""
        self._set({"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}})
        while True:
            await asyncio.sleep(0.3)
            try:
                self._around.mounts(self.spec)
                await self._around.variables(self.spec)
            except CannotConfigure:
                continue
            return await self._run_once()

    async def _pull_in_vain(self) -> None:
        image = self.spec["image"]
        text = f'Back-off pulling image "{image}": not found'
        self._set({"waiting": {"reason": "ErrImagePull", "message": f"{image}: not found"}})
        self._around.event("Failed", f'Failed to pull image "{image}": not found')
        await asyncio.sleep(2 * self._around.scale)
        self._set({"waiting": {"reason": "ImagePullBackOff", "message": text}})
        await asyncio.Event().wait()

    async def _wait_for_another_name(self) -> None:
        image = self.spec["image"]
        text = f'couldn\'t parse image name "{image}": invalid reference format'
        text = f'Failed to apply default image tag "{image}": {text}'
        self._set({"waiting": {"reason": "InvalidImageName", "message": text}})
        self._around.event("InspectFailed", text)
        await asyncio.Event().wait()

    async def _back_off(self, failures: int, terminated: Object) -> None:
        """Wait before a restart. The first restart is immediate."""
        self.last_state = {"terminated": terminated}
        if failures:
            seconds = min(_BACKOFF_S * 2 ** (failures - 1), _LONGEST_BACKOFF_S)
            title = f"{self._pod['metadata']['name']}_{self._pod['metadata']['namespace']}"
            text = f"back-off {seconds:g}s restarting failed container={self.name} pod={title}"
            self._set({"waiting": {"reason": "CrashLoopBackOff", "message": text}})
            self._around.event("BackOff", text)
            await asyncio.sleep(seconds * self._around.scale)
        self.restarts += 1

    def _is_started_again(self, code: int) -> bool:
        if self._stopping:
            return False
        for rule in self.spec.get("restartPolicyRules") or []:
            wanted = rule.get("exitCodes") or {}
            is_in = code in (wanted.get("values") or [])
            if rule.get("action") == "Restart" and is_in == (wanted.get("operator") == "In"):
                return True
        policy = self.spec.get("restartPolicy") or self._pod["spec"].get("restartPolicy", "Always")
        return policy == "Always" or (policy == "OnFailure" and code != 0)

    async def _run_out_of_memory(self) -> None:
        after = (self._pod["metadata"].get("annotations") or {}).get(_OOM)
        if after and not self.restarts and self._process is not None:
            await asyncio.sleep(float(after))
            self._oom = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _message_file(self) -> Path:
        path = Path(self.spec.get("terminationMessagePath") or "/dev/termination-log")
        if path.is_relative_to(self._around.root):
            return path
        return self._around.folder / f"{self.name}.termination-log"

    def _message(self, path: Path, code: int) -> str:
        with contextlib.suppress(OSError):
            if message := path.read_bytes()[:_LONGEST_MESSAGE].decode(errors="replace"):
                return message
        if code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            return logs.last_of(self.log())
        return ""

    def _set(self, state: Object, *, ended: bool = False) -> None:
        self.state = state
        if ended:
            self.ready = False
            self.ended.set()
        self._around.changed()
