"""Implement the commands for a job, for a host or for this machine."""

from __future__ import annotations

import argparse
import difflib
import getpass
import json
import math
import os
import time

import msgspec

from rekindle.cli.terminal_output import clock, table
from rekindle.engines.client import JobClient
from rekindle.engines.hosts import HostLog
from rekindle.errors import JobError, UsageError
from rekindle.job.ascend import ascend_environment, check_environment, survey_here
from rekindle.job.journal_reader import events_in
from rekindle.job.spec import JobDirectory, home, job_directory
from rekindle.profiling.switch import ProfilingOrder
from rekindle.protocol.agent import Approval, Inject, InjectionKind
from rekindle.protocol.http_views import Drain
from rekindle.recovery.faults.classification import EventSource, HealthEvent
from rekindle.recovery.faults.tables.verdict import FaultOrigin, Severity
from rekindle.recovery.journal import attempts, journal
from rekindle.recovery.journal.host_history import HostReleased
from rekindle.recovery.policy.policy import Policy
from rekindle.supervised import reports_in
from rekindle.words import known


def status(options: argparse.Namespace) -> None:
    """Print the state of a job, from its coordinator, or from its journal if it does not run."""
    directory = directory_of(options.job)
    events = events_in(directory.journal_file)
    endpoint = directory.endpoint()
    end = attempts.end_of(events)
    if endpoint is not None and end is None:
        view = JobClient(endpoint, directory.secret()).status()
        if options.json:
            print(msgspec.json.encode(view).decode())
            return
        print(f"job {view.job_id}: {view.state}, attempt {view.attempt}")
        print(f"step {view.finished} of {view.total or '?'}; generation {view.generation}")
        rows = [(r.rank, r.node, r.pid or "-", r.finished, r.status) for r in view.ranks]
        table(("rank", "node", "pid", "finished", "status"), rows)
        for move in view.moves:
            waits = "its ranks start on a spare" if move.spare else "the job waits for a spare"
            print(f"{move.reason}: {'it moves after this step' if move.ready else waits}")
    else:
        result = (end.outcome, end.reason, end.finished) if end else ("died", "no coordinator", 0)
        if options.json:
            fields = dict(zip(("state", "reason", "finished"), result, strict=True))
            print(json.dumps({"job_id": options.job} | fields))
            return
        print(f"job {options.job}: {result[0]} after {result[2]} steps: {result[1]}")
    waiting = attempts.waits_for_approval(events)
    if waiting is not None:
        print(
            f"incident {waiting.incident} waits for your approval of {waiting.strategy.value}: "
            f"{waiting.reason}\n  rekindle approve {options.job} --incident {waiting.incident}"
        )
    for file, error in reports_in(directory.path):
        print(f"a bug in Rekindle: {error}\n  {file}")


def incidents(options: argparse.Namespace) -> None:
    """List a job's incidents."""
    found = journal.incidents(events_in(directory_of(options.job).journal_file))
    if options.json:
        print(msgspec.json.encode(found).decode())
        return
    if not found:
        print(f"job {options.job}: no incident")
        return
    rows = [
        (
            one.number,
            clock(one.detected),
            one.cause.kind.value,
            one.cause.blamed(),
            " > ".join(strategy.value for strategy in one.strategies) or "-",
            f"{(one.first_step - one.detected) * 1000:.0f} ms" if one.closed else "open",
            known(one.steps_lost),
        )
        for one in found
    ]
    table(("#", "detected", "fault", "where", "strategy", "took", "steps lost"), rows)
    for one in found:
        if one.reason:
            print(f"{one.number}. {one.reason}")


def nodes(options: argparse.Namespace) -> None:
    """List the hosts in the log, isolated ones first."""
    if _of_a_cluster(options):
        from rekindle.cli import cluster  # imports the kubernetes client only on use

        cluster.nodes(options)
        return
    now = time.time()
    found = sorted(HostLog(home()).hosts().values(), key=lambda h: (not h.isolated, h.host))
    if options.json:
        print(msgspec.json.encode(found).decode())
        return
    rows = [(h.host, h.state(now), len(h.faults), h.isolated_by or "-", h.checked()) for h in found]
    table(("node", "state", "faults", "isolated by", "checked"), rows)
    for host in found:
        if host.isolated:
            print(f"{host.host}: {host.isolated}")


def release_node(options: argparse.Namespace) -> None:
    """Let jobs use a host again. Raises UsageError: the host is unknown."""
    if _of_a_cluster(options):
        from rekindle.cli import cluster

        cluster.release_node(options)
        return
    log = HostLog(home())
    known = log.hosts()
    if options.node not in known:
        raise UsageError(
            f"there is no record of a node {options.node!r}; rekindle nodes lists the known nodes"
        )
    log.append(HostReleased(host=options.node, at=time.time(), by=getpass.getuser()))
    print(f"jobs may use {options.node} again")


def approve(options: argparse.Namespace) -> None:
    """Answer an incident that waits for a person. Raises JobError: no incident waits."""
    client = _client(options.job)
    waiting = attempts.waits_for_approval(events_in(directory_of(options.job).journal_file))
    number = options.incident or (waiting.incident if waiting else 0)
    if not number:
        raise JobError(f"no incident of job {options.job} waits for approval")
    about = waiting.fault.at if waiting and waiting.fault else 0.0
    by = getpass.getuser()
    answer = Approval(incident=number, granted=not options.deny, by=by, about=about)
    client.approve(answer)


def profile(options: argparse.Namespace) -> None:
    """Switch the light profiling of a job's ranks."""
    client = _client(options.job)
    kinds = tuple(options.kinds.split(",")) if options.kinds else ()
    order = ProfilingOrder(on=options.switch == "on", kinds=kinds, by=getpass.getuser())
    client.profile(order)


def report_fault(options: argparse.Namespace) -> None:
    """Report a fault code, XID, kernel line or condition of a node to its job.

    Raises UsageError: neither a node nor a host is given.
    """
    if options.node < 0 and not options.host:
        raise UsageError("give --node NODE or --host NAME")
    client = _client(options.job)
    event = HealthEvent(
        source=EventSource(options.source),
        what=options.what,
        node=options.node,
        host=options.host,
        within_s=options.within,
        device=options.device,
        gone=options.gone,
        by=getpass.getuser(),
        severity=Severity[options.severity.upper()] if options.severity else None,
        origin=FaultOrigin(options.origin) if options.origin else None,
    )
    client.report(event)


def drain(options: argparse.Namespace) -> None:
    """Move a node of a job to another agent. Raises JobError: the node cannot move."""
    order = Drain(node=options.node, by=getpass.getuser(), deadline_s=options.deadline)
    _client(options.job).drain(order)


def stop(options: argparse.Namespace) -> None:
    """Stop a job as a cancelled flow run does, also while a flow steers it."""
    _client(options.job).stop(by=getpass.getuser())


def inject(options: argparse.Namespace) -> None:
    """Order a fault in a rank. Raises UsageError: an option has a wrong value."""
    if options.step is not None and options.step < 0:
        raise UsageError(f"--step {options.step}: give 0 or more")
    if not 0 <= options.seconds < math.inf:
        raise UsageError(f"--seconds {options.seconds}: give 0 or more")
    order = Inject(
        rank=options.rank,
        kind=InjectionKind(options.kind),
        step=options.step,
        seconds=options.seconds,
    )
    _client(options.job).inject(order)


def npu_check(options: argparse.Namespace) -> int:
    """Print the findings. Status 0: ranks can train on NPUs here; 1: a part is missing.

    Raises UsageError: a variable of HCCL has a wrong value.
    """
    check_environment(os.environ, Policy())
    found = survey_here()
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        table(
            ("ranks on NPUs need", "state", "found"),
            [(each.what, "ok" if each.is_there else "missing", each.finding) for each in found],
        )
        for name, value in sorted(ascend_environment(os.environ, Policy()).items()):
            print(f"ranks get {name}={value}")
        missing = [each for each in found if not each.is_there]
        if missing:  # each requirement depends on the ones before it
            print(f"\n{missing[0].what}:\n  {missing[0].do}")
    return 0 if all(each.is_there for each in found) else 1


def directory_of(job: str) -> JobDirectory:
    """Return the directory of a job. Raises UsageError: there is no such job."""
    directory = JobDirectory(job_directory(job))
    if not directory.journal_file.exists():
        others = [each.name for each in directory.path.parent.glob("*")]
        nearest = difflib.get_close_matches(job, others, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "rekindle jobs lists them"
        raise UsageError(f"there is no job {job!r} in {directory.path.parent}; {hint}")
    return directory


def _client(job: str) -> JobClient:
    """Return a client of a running job.

    Raises UsageError: the job does not exist. Raises JobError: it does not run.
    """
    directory = directory_of(job)
    endpoint = directory.endpoint()
    if endpoint is None or attempts.end_of(events_in(directory.journal_file)) is not None:
        raise JobError(f"job {job} does not run")
    return JobClient(endpoint, directory.secret())


def _of_a_cluster(options: argparse.Namespace) -> bool:
    return bool(options.kubeconfig or options.context or options.namespace)
