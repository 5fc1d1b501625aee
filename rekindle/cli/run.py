"""Implement `rekindle run`: run a job on this machine, or this machine's node of another job."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from rekindle import names
from rekindle.checkpoints.location import absolute
from rekindle.checkpoints.open_store import open_store
from rekindle.checkpoints.store import Checkpoint, CheckpointStore
from rekindle.cli import terminal
from rekindle.cli.checkpoints import chosen, copy_to
from rekindle.cli.run_spec import entry_kind, host_and_port, read_spec
from rekindle.console import Process, catch, say, start
from rekindle.engines.client import JobClient
from rekindle.engines.hosts import SimulatedHosts
from rekindle.engines.local import LocalEngine
from rekindle.errors import LeaseHeldError, RekindleError, UnansweredError, UsageError
from rekindle.file_lock import locked
from rekindle.job.journal_reader import events_in
from rekindle.job.lifeline import PASSED_ON
from rekindle.job.spec import Endpoint, JobDirectory, JobSpec, check, home, job_directory
from rekindle.recovery.journal import attempts
from rekindle.recovery.policy.policy import without_effect
from rekindle.waiting import retry

ASK_EVERY_S = 0.5  # for a node that waits for its coordinator
_ANSWER_S = 10.0  # for a store that may hang; the job itself waits longer for it


def run(options: argparse.Namespace) -> int:
    """Run a job, or one node of it; return the exit status."""
    start(Process.LAUNCHER, form=options.log_format, node=options.node_rank)
    catch()
    return join(options) if options.coordinator else launch(options)


def launch(options: argparse.Namespace) -> int:
    """Run a job whose coordinator is on this machine; return the exit status."""
    spec = check(read_spec(options))
    if options.node_rank is not None and not 0 <= options.node_rank < spec.nodes:
        raise UsageError(
            f"--node-rank {options.node_rank}: with --nnodes {spec.nodes} node ranks are 0 to "
            f"{spec.nodes - 1}"
        )
    if options.spare or (spec.spares and options.node_rank is not None):
        raise UsageError(
            "a spare on another machine joins with --coordinator HOST:PORT --spare; --spares "
            "starts spares on this machine, together with all nodes"
        )
    if options.node_rank is not None:
        spec = msgspec.structs.replace(spec, engine=())  # it cannot reschedule nodes elsewhere
    for text in without_effect(spec.policy) if options.policy else ():
        say(f"{options.policy}: {text}")
    directory = JobDirectory(spec.directory)
    stop = terminal.Stop()
    newest = newest_of(spec)
    with _only_launcher(directory, spec):
        if options.resume_from:
            begin_with(spec, options.resume_from, newest)
        nodes = None if options.node_rank is None else (options.node_rank,)
        engine = LocalEngine(
            directory,
            foreground=True,
            listen=host_and_port(options.listen, "--listen"),
            nodes=nodes,
            address=options.local_addr or names.LOOPBACK,
            hosts=SimulatedHosts(home()) if nodes is None else None,
        )

        def launched(endpoint: Endpoint) -> None:
            if nodes is not None:
                host = options.local_addr or endpoint.host
                _tell_how_to_join(directory, f"{host}:{endpoint.port}")

        attempt = attempts.number(events_in(directory.journal_file), none=-1) + 1
        if not (options.job_id or options.rdzv_id):
            say(f"job {spec.job_id} starts; files are in {directory.path}", logging.INFO)
        return terminal.run(engine, directory, stop, attempt=attempt, launched=launched)


def newest_of(spec: JobSpec) -> Checkpoint | None:
    """Return the newest complete checkpoint of the job; None: none, or the store is unreadable.

    The agents of the job read the store again. They report a store that they cannot read.
    Raises UsageError: the newest checkpoint belongs to another job.
    """
    newest = _first_of(spec)
    if newest is not None and newest.manifest.job_id != spec.job_id:
        where = spec.checkpoint_store
        raise UsageError(
            f"{where} has checkpoints of job {newest.manifest.job_id!r} (step "
            f"{newest.manifest.step}), and this is job {spec.job_id!r}: to continue that job, give "
            f"--job-id {newest.manifest.job_id}; to begin this job with its state, give "
            f"--resume-from {where} and another --checkpoint-dir, or none"
        )
    return newest


def begin_with(spec: JobSpec, source: str, newest: Checkpoint | None) -> None:
    """Copy the newest checkpoint of another store to the job's store, unless the job has one.

    source: the location of a store, the id of its job, or a reference of a published checkpoint.
    newest: the job's own checkpoint.
    Raises UsageError: `source` names no other store; CheckpointError: there is no intact
    checkpoint, or it cannot be copied.
    """
    if newest is not None:
        say(
            f"job {spec.job_id} continues from its own checkpoint of step {newest.manifest.step}; "
            f"--resume-from {source} has no effect",
            logging.INFO,
        )
        return
    with chosen(source, None) as checkpoint:
        copied = copy_to(_store(spec), checkpoint, job_id=spec.job_id)
        say(f"job {spec.job_id} begins with {checkpoint.location}: {copied}", logging.INFO)


def _store(spec: JobSpec) -> CheckpointStore:
    return open_store(spec.checkpoint_store, os.environ | spec.environment)


def _first_of(spec: JobSpec) -> Checkpoint | None:
    """Return the newest complete checkpoint of any job in the store."""
    found: list[Checkpoint] = []

    def look() -> None:
        try:
            store = _store(spec)
            for step, generation in list(store.keys()):
                checkpoint = store.find(step, generation)
                if checkpoint is not None:
                    found.append(checkpoint)
                    return
        except RekindleError as error:
            say(f"whose checkpoints {spec.checkpoint_store} has is unknown: {error}")

    reader = threading.Thread(target=look, daemon=True)
    reader.start()
    reader.join(_ANSWER_S)
    if reader.is_alive():
        say(f"{spec.checkpoint_store} does not answer; whose checkpoints it has is unknown")
    return found[0] if found else None


@contextmanager
def _only_launcher(directory: JobDirectory, spec: JobSpec) -> Iterator[None]:
    """Lock the job's launch lock, so that one id has one job. Raises LeaseHeldError."""
    directory.make()

    def busy() -> None:
        raise LeaseHeldError(f"another process runs job {spec.job_id}; choose another --job-id")

    with locked(directory.path / names.LAUNCH_LOCK_FILE, busy):
        directory.create(spec)
        yield


def _tell_how_to_join(directory: JobDirectory, address: str) -> None:
    say(
        f"the other nodes join with: {names.ENV_SECRET}=$(cat "
        f"{directory.path / names.SECRET_FILE}) rekindle run --coordinator {address} "
        "--node-rank R",
        logging.INFO,
    )


def join(options: argparse.Namespace) -> int:
    """Run one node of a job whose coordinator is on another machine; return the exit status.

    The coordinator sends the job's description. A script in the options replaces the job's script.
    """
    secret = os.environ.get(names.ENV_SECRET)
    if not secret:
        raise UsageError(
            f"{names.ENV_SECRET} is not set; set it to the job's secret to join the job"
        )
    if options.spare and options.node_rank is not None:
        raise UsageError("a spare does not have a node rank; give either --spare or --node-rank")
    host, port = host_and_port(options.coordinator, "--coordinator")
    spec, attempt = _wait_for_spec(host, port, secret, limit_s=options.join_timeout)
    with _folder_of_node(spec) as folder:
        spec = check(_ours(spec, options, folder))
        directory = JobDirectory(folder)
        directory.create(spec)
        command = [sys.executable, "-m", "rekindle.agent.process", "--directory", str(folder)]
        command += ["--coordinator", f"{host}:{port}", "--attempt", str(attempt)]
        command += ["--node", str(-1 if options.node_rank is None else options.node_rank)]
        command += ["--spare"] if options.spare else []
        command += ["--address", options.local_addr or _address_towards(host, port)]
        return _run_agent(command)


@contextmanager
def _folder_of_node(spec: JobSpec) -> Iterator[Path]:
    """Yield the folder for the records of a joining node's ranks.

    With REKINDLE_HOME the folder persists, otherwise it is temporary.
    """
    if os.environ.get(names.ENV_HOME):
        yield job_directory(spec.job_id) / names.NODES_DIRECTORY / socket.gethostname()
        return
    with tempfile.TemporaryDirectory(prefix="rekindle-node-") as folder:
        yield Path(folder)


def _run_agent(command: list[str]) -> int:
    """Run an agent that ends with this process, in any case; return its status, or 128 + signal."""
    stopped_by: list[int] = []
    agents: list[subprocess.Popen[bytes]] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        for agent in agents:
            agent.send_signal(terminal.stop_signal(stopped_by))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: terminal.pass_on(number, agents))
    lifeline, _ = os.pipe()  # the other end closes when this process ends
    command = [*command, "--lifeline-fd", str(lifeline)]
    agents.append(subprocess.Popen(command, pass_fds=[lifeline], start_new_session=True))
    if stopped_by:
        agents[0].terminate()
    status = agents[0].wait()
    return 128 + stopped_by[0] if stopped_by else status


def _wait_for_spec(host: str, port: int, secret: str, *, limit_s: float) -> tuple[JobSpec, int]:
    """Request the job's description until there is an attempt to join.

    Raises JobError: there is none within the limit, or the coordinator refuses.
    """
    client = JobClient(Endpoint(host=host, port=port, pid=0, attempt=0), secret)
    return retry(client.spec, UnansweredError, limit_s, ASK_EVERY_S)


def _ours(spec: JobSpec, options: argparse.Namespace, folder: Path) -> JobSpec:
    """Adapt the job's description to this machine."""
    changes: dict[str, object] = {
        "directory": str(folder),
        "log_directory": str(Path(options.log_dir or folder / names.LOGS_DIRECTORY).absolute()),
    }
    if options.checkpoint_dir:
        changes["checkpoint_store"] = absolute(options.checkpoint_dir)
    if options.script:
        changes |= {
            "entry": entry_kind(options),
            "target": options.script,
            "arguments": tuple(options.arguments),
            "working_directory": str(Path.cwd()),
        }
    return msgspec.structs.replace(spec, **changes)


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to the coordinator."""
    with socket.create_connection((host, port), timeout=10) as probe:
        return str(probe.getsockname()[0])
