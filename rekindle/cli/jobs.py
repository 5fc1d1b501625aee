"""What a person asks of a job or a host from the shell: status, incidents, nodes, approve, stop."""

from __future__ import annotations

import argparse
import getpass
import json
import time
from collections.abc import Sequence

import msgspec

from rekindle.cli.terminal_output import clock, table
from rekindle.engines.client import JobClient
from rekindle.engines.host_log import HostLog
from rekindle.errors import JobError, UsageError
from rekindle.job.journal_reader import events_in
from rekindle.job.spec import Endpoint, JobDirectory, home, job_directory
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol.agent import Approval
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.host_history import HostReleased


def status(options: argparse.Namespace) -> int:
    """Tell where a job is: its coordinator says so, or its journal, when it does not run."""
    directory = _directory(options.job)
    events = events_in(directory.journal_file)
    endpoint = directory.endpoint()
    if endpoint is not None and not _has_ended(events):
        view = JobClient(endpoint, directory.secret()).status()
        if options.json:
            print(msgspec.json.encode(view).decode())
            return 0
        print(f"job {view.job_id}: {view.state}, attempt {view.attempt}")
        print(f"step {view.finished} of {view.total or '?'}; generation {view.generation}")
        rows = [(r.rank, r.node, r.pid or "-", r.finished, r.status) for r in view.ranks]
        table(("rank", "node", "pid", "finished", "status"), rows)
    else:
        end = next((e for e in reversed(events) if isinstance(e, journal.Ended)), None)
        told = (end.outcome, end.reason, end.finished) if end else ("died", "no coordinator", 0)
        if options.json:
            said = dict(zip(("state", "reason", "finished"), told, strict=True))
            print(json.dumps({"job_id": options.job} | said))
            return 0
        print(f"job {options.job}: {told[0]} after {told[2]} steps: {told[1]}")
    waiting = journal.waits_for_approval(events)
    if waiting is not None:
        print(
            f"incident {waiting.incident} waits for your approval of {waiting.strategy.value}: "
            f"{waiting.reason}\n  rekindle approve {options.job} --incident {waiting.incident}"
        )
    return 0


def incidents(options: argparse.Namespace) -> int:
    """List a job's incidents."""
    found = journal.incidents(events_in(_directory(options.job).journal_file))
    if options.json:
        print(msgspec.json.encode(found).decode())
        return 0
    rows = [
        (
            one.number,
            clock(one.detected),
            one.cause.kind.value,
            one.cause.blamed(),
            " > ".join(strategy.value for strategy in one.strategies) or "-",
            f"{(one.first_step - one.detected) * 1000:.0f} ms" if one.closed else "open",
            one.steps_lost,
        )
        for one in found
    ]
    table(("#", "detected", "fault", "where", "strategy", "took", "steps lost"), rows)
    for one in found:
        if one.reason:
            print(f"{one.number}. {one.reason}")
    return 0


def nodes(options: argparse.Namespace) -> int:
    """List the hosts that anything is known of, isolated ones first."""
    if _of_a_cluster(options):
        from rekindle.cli import cluster_nodes  # the client, where it is used

        return cluster_nodes.nodes(options)
    now = time.time()
    found = sorted(HostLog(home()).hosts().values(), key=lambda h: (not h.isolated, h.host))
    if options.json:
        print(msgspec.json.encode(found).decode())
        return 0
    rows = [(h.host, h.state(now), len(h.faults), h.isolated_by or "-", h.checked()) for h in found]
    table(("node", "state", "faults", "isolated by", "checked"), rows)
    for host in found:
        if host.isolated:
            print(f"{host.host}: {host.isolated}")
    return 0


def release_node(options: argparse.Namespace) -> int:
    """Let a host be used again. Raises UsageError: nothing is known of it, or it is in use."""
    if _of_a_cluster(options):
        from rekindle.cli import cluster_nodes

        return cluster_nodes.release_node(options)
    log = HostLog(home())
    known = log.hosts()
    if options.node not in known:
        raise UsageError(f"nothing is known of a node {options.node!r}; see rekindle nodes")
    log.append(HostReleased(host=options.node, at=time.time(), by=getpass.getuser()))
    print(f"{options.node} may be used again")
    return 0


def approve(options: argparse.Namespace) -> int:
    """Answer an incident that waits for a person. Raises JobError: none does."""
    endpoint, directory = _running(options.job)
    waiting = journal.waits_for_approval(events_in(directory.journal_file))
    number = options.incident or (waiting.incident if waiting else 0)
    if not number:
        raise JobError(f"nothing of job {options.job} waits for approval")
    about = waiting.fault.at if waiting and waiting.fault else 0.0
    by = getpass.getuser()
    answer = Approval(incident=number, granted=not options.deny, by=by, about=about)
    JobClient(endpoint, directory.secret()).approve(answer)
    return 0


def profile(options: argparse.Namespace) -> int:
    """Have ranks write down where their time goes, or no more."""
    endpoint, directory = _running(options.job)
    kinds = tuple(options.kinds.split(",")) if options.kinds else ()
    order = ProfilingOrder(on=options.switch == "on", kinds=kinds, by=getpass.getuser())
    JobClient(endpoint, directory.secret()).profile(order)
    return 0


def report_fault(options: argparse.Namespace) -> int:
    """Tell a job of a fault code, XID, kernel line or condition of one of its nodes."""
    endpoint, directory = _running(options.job)
    sign = HealthEvent(
        source=EventSource(options.source),
        what=options.what,
        node=options.node,
        device=options.device,
        gone=options.gone,
        by=getpass.getuser(),
        severity=Severity[options.severity.upper()] if options.severity else None,
        origin=FaultOrigin(options.origin) if options.origin else None,
    )
    JobClient(endpoint, directory.secret()).report(sign)
    return 0


def stop(options: argparse.Namespace) -> int:
    """Stop a job, as a cancelled flow run does, also while a flow steers it."""
    endpoint, directory = _running(options.job)
    JobClient(endpoint, directory.secret()).stop(by=getpass.getuser())
    return 0


def _directory(job: str) -> JobDirectory:
    directory = JobDirectory(job_directory(job))
    if not directory.journal_file.exists():
        raise UsageError(f"there is no job {job!r} in {directory.path.parent}")
    return directory


def _running(job: str) -> tuple[Endpoint, JobDirectory]:
    directory = _directory(job)
    endpoint = directory.endpoint()
    if endpoint is None or _has_ended(events_in(directory.journal_file)):
        raise JobError(f"job {job} does not run")
    return endpoint, directory


def _has_ended(events: Sequence[journal.AnyEvent]) -> bool:
    last = [e for e in events if isinstance(e, (journal.JobStarted, journal.Ended))]
    return bool(last) and isinstance(last[-1], journal.Ended)


def _of_a_cluster(options: argparse.Namespace) -> bool:
    return bool(options.kubeconfig or options.context or options.namespace)
