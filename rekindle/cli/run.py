"""Implement `rekindle run`: run a job on this machine, or this machine's node of another job."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from rekindle import names
from rekindle.checkpoints.location import absolute
from rekindle.cli import terminal
from rekindle.cli.rendezvous import Meeting, endpoint_without_effect, is_here, meeting_of
from rekindle.cli.resuming import begin_with, newest_of
from rekindle.cli.run_spec import KEPT, check_joiner, entry_kind, host_and_port, read_spec
from rekindle.console import Process, catch, say, start
from rekindle.engines.client import JobClient
from rekindle.engines.hosts import simulated_hosts
from rekindle.engines.local import LocalEngine
from rekindle.errors import (
    JobError,
    LeaseHeldError,
    PortTakenError,
    UnansweredError,
    UsageError,
)
from rekindle.file_lock import locked
from rekindle.job.addresses import address_for_others, interfaces, is_loopback, resolve
from rekindle.job.journal_reader import events_in
from rekindle.job.lifeline import PASSED_ON
from rekindle.job.spec import (
    Endpoint,
    JobDirectory,
    JobSpec,
    check,
    job_directory,
    on_this_machine,
)
from rekindle.recovery.journal import attempts
from rekindle.recovery.policy.policy import without_effect
from rekindle.waiting import retry

ASK_EVERY_S = 0.5  # for a node that waits for its coordinator
_LISTEN = f"{names.LOOPBACK}:0"  # without --listen
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Host:
    """How this machine hosts the coordinator of a job.

    listen: the address at which the coordinator listens.

    node: the node rank that this machine runs; None: it simulates all nodes.

    address: of this machine for others.

    secret: the job's; empty: an existing one, or a random one.

    meeting: the address at which the other machines join; None: they use --coordinator.
    """

    listen: tuple[str, int]
    node: int | None
    address: str
    secret: str
    meeting: Meeting | None = None


@dataclass(frozen=True)
class Place:
    """How this machine joins a job: the coordinator's address, the secret, and its node rank."""

    host: str
    port: int
    secret: str
    node: int | None


def run(options: argparse.Namespace) -> int:
    """Run a job, or one node of it; return the exit status."""
    start(Process.LAUNCHER, form=options.log_format, node=options.node_rank)
    catch()
    if options.coordinator:
        return join(options)
    meeting = meeting_of(options)
    if not options.script:
        raise UsageError("name the training script: rekindle run [options] train.py [arguments]")
    if meeting is not None:
        return meet(options, meeting)
    if line := endpoint_without_effect(options):
        say(line)
    listen, node = host_and_port(options.listen or _LISTEN, "--listen"), options.node_rank
    here = Host(
        listen=listen,
        node=node,
        address=options.local_addr
        or (names.LOOPBACK if node is None else address_for_others(listen[0])),
        # A secret in the environment of a job on one machine belongs to another job.
        secret="" if node is None else os.environ.get(names.ENV_SECRET, ""),
    )
    stop = terminal.Stop()
    with _opened(options, here) as engine:
        return _launch(options, here, engine, stop)


def meet(options: argparse.Namespace, meeting: Meeting) -> int:
    """Host the coordinator at the meeting's address, or join it; return the exit status.

    The name of the host may not be known yet, and another command of this machine may already be
    the host. Raises JobError: no coordinator answers within the limit.
    """
    secret, hosts = os.environ.get(names.ENV_SECRET) or names.NO_SECRET, meeting.hosts
    place = Place(meeting.host, meeting.port, secret, meeting.node)
    deadline, told = time.monotonic() + meeting.limit_s, False
    while True:
        if hosts or (hosts is None and _is_here(meeting.host)):
            address = options.local_addr or address_for_others(meeting.host)
            here = Host(meeting.listen, meeting.node or 0, address, secret, meeting)
            before = {number: signal.getsignal(number) for number in (*_STOPS, *PASSED_ON)}
            with ExitStack() as opened:
                stop = terminal.Stop()
                try:
                    engine = opened.enter_context(_opened(options, here))
                except (LeaseHeldError, PortTakenError):
                    if hosts:
                        raise
                    hosts = False
                    say(
                        "another process of this machine runs this job, or has port "
                        f"{meeting.port}, so this command joins there",
                        logging.INFO,
                    )
                else:
                    return _launch(options, here, engine, stop)
            for number, handler in before.items():
                signal.signal(number, handler)
        try:
            spec, attempt = _client(place).spec()
        except UnansweredError as error:
            if time.monotonic() > deadline:
                raise JobError(
                    f"no coordinator answers at {meeting.text} within {meeting.limit_s:g} s "
                    f"({error}). {_who_hosts(meeting)}"
                ) from error
            if not told:
                told = True
                say(
                    f"this machine waits up to {meeting.limit_s:g} s for the coordinator at "
                    f"{meeting.text}. {_who_hosts(meeting)}",
                    logging.INFO,
                )
            time.sleep(ASK_EVERY_S)
        else:
            say(f"this machine joins job {spec.job_id} at {meeting.text}", logging.INFO)
            _warn(meeting, secret)
            return _join(options, place, spec, attempt)


def _is_here(host: str) -> bool:
    own_names = {socket.gethostname()}
    return is_here(host, own_names, interfaces(), resolve(host))


def _who_hosts(meeting: Meeting) -> str:
    if meeting.hosts is None:
        return (
            f"The machine that has the address {meeting.host} hosts it. If no machine finds that "
            "out, because the address is that of a service, give --rdzv-conf is_host=1 on one "
            "machine"
        )
    return "The machine of node 0 hosts it" if meeting.node else "Another machine hosts it"


def _warn(meeting: Meeting, secret: str) -> None:
    if meeting.ignored:
        say(meeting.ignored)
    if secret == names.NO_SECRET:
        say(
            f"{names.ENV_SECRET} is not set, so each process that reaches {meeting.text} can join "
            f"and stop this job, as with torchrun; set {names.ENV_SECRET} to the same value on all "
            "machines"
        )


@contextmanager
def _opened(options: argparse.Namespace, here: Host) -> Iterator[LocalEngine]:
    """Write the job's files, take the port of the coordinator, and yield the engine of the job.

    Raises LeaseHeldError: another command runs this job. Raises PortTakenError, or another
    UsageError: the job cannot start here.
    """
    spec = check(read_spec(options))
    if here.node is None:
        spec = on_this_machine(spec)
    if options.spare or (spec.spares and here.node is not None):
        raise UsageError(
            "a spare on another machine joins with --coordinator HOST:PORT --spare; --spares "
            "starts spares on this machine, together with all nodes"
        )
    if here.node is not None:
        spec = msgspec.structs.replace(spec, engine=())  # it cannot reschedule nodes elsewhere
    if here.meeting is not None:  # the options are the coordinator's address
        spec = msgspec.structs.replace(spec, master_addr="", master_port=0)
    directory = JobDirectory(spec.directory)
    newest = newest_of(spec)
    with _only_launcher(directory, spec, here.secret):
        if options.resume_from:
            begin_with(spec, options.resume_from, newest)
        engine = LocalEngine(
            directory,
            foreground=True,
            listen=here.listen,
            nodes=None if here.node is None else (here.node,),
            address=here.address,
            hosts=simulated_hosts(spec) if here.node is None else None,
        )
        engine.prepare()
        try:
            yield engine
        finally:
            engine.leave()


def _launch(
    options: argparse.Namespace, here: Host, engine: LocalEngine, stop: terminal.Stop
) -> int:
    """Run the job to its end; return the exit status."""
    directory, spec = engine.directory, engine.directory.spec()
    _say_how_nodes_meet(spec, here)
    if options.policy:
        for text in (*_notices(options.policy), *without_effect(spec.policy)):
            say(f"{options.policy}: {text}")
    attempt = attempts.number(events_in(directory.journal_file), none=-1) + 1
    if not (options.job_id or options.rdzv_id):
        say(f"job {spec.job_id} starts; files are in {directory.path}", logging.INFO)
    told = functools.partial(_tell_how_to_join, options, here, directory)
    return terminal.run(engine, directory, stop, attempt=attempt, launched=told)


def _notices(policy: str) -> list[str]:
    from rekindle.recovery.policy.policy_file import notices_about  # reads YAML

    return notices_about(Path(policy))


def _say_how_nodes_meet(spec: JobSpec, here: Host) -> None:
    """Say where the nodes of the job run, before any other line."""
    if here.meeting is not None:
        text = (
            f"this machine hosts the coordinator of job {spec.job_id}. The other machines join at "
            f"{here.meeting.text} with the same command"
        )
        if not is_loopback(here.meeting.host):
            text += (
                ". The store of the ranks (MASTER_PORT) and gloo use any free ports, so all TCP "
                f"ports must be open between the machines, not only {here.meeting.port}"
            )
        say(text, logging.INFO)
        _warn(here.meeting, here.secret)
    elif here.node is None and spec.nodes > 1:
        say(
            f"this machine simulates {spec.nodes} nodes. For several machines give all of them "
            "--rdzv-endpoint HOST:PORT, or --master-addr and --node-rank",
            logging.INFO,
        )


@contextmanager
def _only_launcher(directory: JobDirectory, spec: JobSpec, secret: str) -> Iterator[None]:
    """Lock the job's launch lock, so that one id has one job. Raises LeaseHeldError."""
    directory.make()

    def busy() -> None:
        raise LeaseHeldError(f"another process runs job {spec.job_id}; choose another --job-id")

    with locked(directory.path / names.LAUNCH_LOCK_FILE, busy):
        directory.create(spec, secret=secret)
        yield


def _tell_how_to_join(
    options: argparse.Namespace, here: Host, directory: JobDirectory, endpoint: Endpoint
) -> None:
    """Print the command for the other machines. It works there as it is.

    It contains a secret that Rekindle has made, but not one that the user has set.
    """
    if here.node is None or here.meeting is not None:
        return
    if is_loopback(here.listen[0]):
        say(
            f"the coordinator listens on {names.LOOPBACK}, so only this machine can run the other "
            "nodes; --listen HOST:PORT lets other machines join",
            logging.INFO,
        )
    kind = ["-m"] if options.module else ["--no-python"] if options.no_python else []
    where = f"{here.address}:{endpoint.port}"
    command = ["rekindle", "run", "--coordinator", where, *kind, options.script]
    text = shlex.join([*command, *options.arguments])
    if here.secret:
        text = f"with the same {names.ENV_SECRET} and: {text}"
    else:
        text = f"with: {names.ENV_SECRET}={directory.secret()} {text}"
    say(f"the other nodes join {text}", logging.INFO)


def join(options: argparse.Namespace) -> int:
    """Run one node of a job whose coordinator has the address in --coordinator."""
    secret = os.environ.get(names.ENV_SECRET)
    if not secret:
        raise UsageError(
            f"{names.ENV_SECRET} is not set; set it to the job's secret to join the job"
        )
    if options.spare and options.node_rank is not None:
        raise UsageError("a spare does not have a node rank; give either --spare or --node-rank")
    without = {"--listen": options.listen, "--rdzv-endpoint": options.rdzv_endpoint}
    for option, value in without.items():
        if value:
            raise UsageError(f"{option} is for another command than --coordinator; give one")
    host, port = host_and_port(options.coordinator, "--coordinator")
    place = Place(host, port, secret, options.node_rank)
    limit_s = options.join_timeout or 0.0
    spec, attempt = retry(_client(place).spec, UnansweredError, limit_s, ASK_EVERY_S)
    return _join(options, place, spec, attempt)


def _client(place: Place) -> JobClient:
    endpoint = Endpoint(host=place.host, port=place.port, pid=0, attempt=0)
    return JobClient(endpoint, place.secret)


def _join(options: argparse.Namespace, place: Place, spec: JobSpec, attempt: int) -> int:
    """Run this machine's node of a job; return the exit status.

    spec: the coordinator's description of the job. Raises UsageError: an option contradicts it.
    """
    check_joiner(options, options.given, spec)
    with _folder_of_node(spec) as folder:
        spec = check(_ours(spec, options, folder))
        directory = JobDirectory(folder)
        directory.create(spec)
        command = [sys.executable, "-m", "rekindle.agent.process", "--directory", str(folder)]
        command += ["--coordinator", f"{place.host}:{place.port}", "--attempt", str(attempt)]
        command += ["--node", str(names.SPARE if place.node is None else place.node)]
        command += ["--spare"] if options.spare else []
        command += ["--address", options.local_addr or address_for_others(place.host)]
        return _run_agent(command, place.secret)


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


def _run_agent(command: list[str], secret: str) -> int:
    """Run an agent that ends with this process, in any case; return its status, or 128 + signal."""
    stopped_by: list[int] = []
    agents: list[subprocess.Popen[bytes]] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped_by.append(number)
        for agent in agents:
            agent.send_signal(terminal.stop_signal(stopped_by))

    for number in _STOPS:
        signal.signal(number, on_signal)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: terminal.pass_on(number, agents))
    lifeline, _ = os.pipe()  # the other end closes when this process ends
    command = [*command, "--lifeline-fd", str(lifeline)]
    environment = os.environ | {names.ENV_SECRET: secret}
    agents.append(
        subprocess.Popen(command, env=environment, pass_fds=[lifeline], start_new_session=True)
    )
    if stopped_by:
        agents[0].terminate()
    status = agents[0].wait()
    return 128 + stopped_by[0] if stopped_by else status


def _ours(spec: JobSpec, options: argparse.Namespace, folder: Path) -> JobSpec:
    """Adapt the job's description to this machine.

    In a pod all variables of the description count: its cluster gave it the secret, which proves
    the coordinator. Elsewhere only Rekindle's own numbers come from the network, because many
    variables can run code.
    """
    own = read_spec(options)
    kept = spec.environment if names.ENV_POD_IP in os.environ else KEPT
    logs = options.log_dir or folder / names.LOGS_DIRECTORY
    changes: dict[str, object] = {
        "directory": str(folder),
        "log_directory": str(Path(logs).absolute()),
        "environment": {name: spec.environment[name] for name in kept if name in spec.environment},
    }
    if options.checkpoint_dir:
        changes["checkpoint_store"] = absolute(options.checkpoint_dir)
    for name in ("role", "redirects", "tee"):
        if name in options.given:
            changes[name] = getattr(own, name)
    if options.script:
        changes |= {
            "entry": entry_kind(options),
            "target": options.script,
            "arguments": tuple(options.arguments),
            "working_directory": str(Path.cwd()),
        }
    return msgspec.structs.replace(spec, **changes)
