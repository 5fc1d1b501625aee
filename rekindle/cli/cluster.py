"""Implement commands for a cluster: its nodes, and the switch of a job's data trace.

`rekindle nodes` and `release-node` read and change the log of hosts and the marks on nodes.
"""

from __future__ import annotations

import argparse
import getpass
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import msgspec

from rekindle.cli.terminal_output import clock, table
from rekindle.console import say
from rekindle.engines.kubernetes.client.api import Api, Object, load
from rekindle.engines.kubernetes.client.api_errors import ApiError
from rekindle.engines.kubernetes.labels import Names
from rekindle.engines.kubernetes.mindcluster import clusterd
from rekindle.engines.kubernetes.placement.host_log import ClusterHostLog
from rekindle.engines.kubernetes.placement.quarantine import (
    IsolationMark,
    Quarantine,
    holds,
    mark_on,
)
from rekindle.errors import JobError, RekindleError, UsageError
from rekindle.profiling.switch import Switch, switch_of
from rekindle.recovery.journal.host_history import Host, HostReleased

NAMESPACE = "default"


class Row(msgspec.Struct, kw_only=True):
    """One host in the JSON output. known: its entry in the log. mark: the mark on its node."""

    host: str
    known: Host | None = None
    mark: IsolationMark | None = None
    there: bool | None = None  # None: the user may not read nodes


def nodes(options: argparse.Namespace) -> None:
    """List the hosts in the log, isolated ones first, and the nodes with a mark.

    Raises JobError: the log is unreadable.
    """
    with _cluster(options) as (api, namespace):
        known = ClusterHostLog(api, namespace).hosts()
        unseen, found = "", dict[str, Object]()
        try:
            for node in Quarantine(api).nodes():
                name = node["metadata"]["name"]
                if name in known or mark_on(node) is not None:
                    found[name] = node
        except ApiError as error:
            unseen = str(error)
    rows = [
        Row(
            host=name,
            known=known.get(name),
            mark=mark_on(found[name]) if name in found else None,
            there=None if unseen else name in found,
        )
        for name in {**known, **found}
    ]
    rows.sort(key=lambda row: (not (row.known and row.known.isolated), not row.mark, row.host))
    if options.json:
        print(msgspec.json.encode(rows).decode())
    else:
        _print(rows, found, unseen)


def _print(rows: list[Row], found: Mapping[str, Object], unseen: str) -> None:
    now = time.time()
    table(
        ("node", "state", "faults", "isolated by", "since", "checked", "in the cluster"),
        [
            (
                row.host,
                row.known.state(now) if row.known else "in use",
                len(row.known.faults) if row.known else 0,
                by or "-",
                clock(at) if at else "-",
                row.known.checked() if row.known else "-",
                _in_the_cluster(row, found.get(row.host)),
            )
            for row in rows
            for by, at in (_isolation(row),)
        ],
    )
    for row in rows:
        why = (row.known and row.known.isolated) or (row.mark and row.mark.reason)
        if why:
            print(f"{row.host}: {why}")
    if unseen:
        print(f"Rekindle cannot read the nodes of the cluster: {unseen}")


def _isolation(row: Row) -> tuple[str, float]:
    """Return who isolated a host, and when, or empty values."""
    if row.known and row.known.isolated:
        return row.known.isolated_by, row.known.isolated_at
    return (row.mark.by, row.mark.at) if row.mark else ("", 0.0)


def _in_the_cluster(row: Row, node: Object | None) -> str:
    if row.there is None:
        return "?"
    if node is None:
        return "no such node"
    if row.mark is None:
        return "cordoned, but not by Rekindle" if node["spec"].get("unschedulable") else "-"
    return row.mark.done if holds(node, row.mark) else f"no longer {row.mark.done}"


def release_node(options: argparse.Namespace) -> None:
    """Let jobs use a host again, and remove Rekindle's mark from its node.

    Raises UsageError: the host is unknown. Raises JobError: its node cannot be released.
    """
    host = options.node
    with _cluster(options) as (api, namespace):
        log, marks = ClusterHostLog(api, namespace), Quarantine(api)
        is_known = host in log.hosts()
        if is_known:
            log.append(HostReleased(host=host, at=time.time(), by=getpass.getuser()))
        try:
            node = marks.take(host, namespace)
        except ApiError as error:
            if not is_known:
                raise
            raise JobError(
                f"jobs of this namespace may use {host} again, but Rekindle cannot find out "
                f"whether it is cordoned or tainted: {error}"
            ) from error
    mark = mark_on(node) if node is not None else None
    if not is_known and mark is None:
        raise UsageError(
            f"there is no record of a node {host!r}; rekindle nodes lists the known nodes"
        )
    print(f"jobs may use {host} again{_left(mark, host, namespace)}")


def _left(mark: IsolationMark | None, host: str, namespace: str) -> str:
    """Return the part of a message that names a remaining mark."""
    if mark is None:
        return ""
    if mark.namespace not in ("", namespace):
        return (
            f" in this namespace; it is still {mark.done} because of job {mark.by}: run rekindle "
            f"release-node {host} --namespace {mark.namespace}"
        )
    return "" if mark.ours else f"; it is still {mark.done}"


def trace(options: argparse.Namespace) -> None:
    """Switch a job's data trace if an option requests it. Print the kinds that are on."""
    wanted = None
    if options.off or options.on is not None:
        wanted = switch_of(() if options.off else options.on.split(","))
    with _cluster(options) as (api, namespace):
        address = _address(api, options) if options.follow else ""
        now = _switch(api, namespace, options, wanted)
        uid = clusterd.uid_of(api, namespace, options.job) if address else ""
    print(" ".join(now.words) or "off", flush=True)
    for switch in clusterd.follow_trace(address, uid) if address else ():
        print(" ".join(switch.words) or "off", flush=True)


def _switch(api: Api, namespace: str, options: argparse.Namespace, wanted: Switch | None) -> Switch:
    """Switch, or only read (None), through ClusterD; without its address by ConfigMap."""
    job = f"{namespace}/{Names.of(options.job).workload}"
    if options.clusterd or api.is_inside:
        try:
            address = _address(api, options)
            if wanted is None:
                return clusterd.get_trace(address, job)
            clusterd.modify_trace(address, job, wanted)
            return wanted
        except RekindleError as error:
            if options.clusterd:
                raise
            say(f"{error}; the command uses the ConfigMap of the job instead")
    if wanted is None:
        return clusterd.traced(api, namespace, options.job)
    clusterd.switch_trace(api, namespace, options.job, wanted)
    return wanted


def signals(options: argparse.Namespace) -> None:
    """Print ClusterD's faults of a job's nodes, or its orders to the job's processes, as JSON."""
    with _cluster(options) as (api, namespace):
        address = _address(api, options)
        uid = clusterd.uid_of(api, namespace, options.job)
    found: Iterator[msgspec.Struct] = clusterd.orders_to(address, uid)
    if options.what == "faults":
        found = clusterd.faults_of(address, uid, follow=options.follow)
    for each in found:
        print(msgspec.json.encode(each).decode(), flush=True)


def _address(api: Api, options: argparse.Namespace) -> str:
    """Return the address of ClusterD. Raises UsageError: it is unknown outside of the cluster."""
    if not (options.clusterd or api.is_inside):
        raise UsageError(
            "this machine is outside of the cluster, so give --clusterd HOST:PORT; for example "
            "with kubectl port-forward"
        )
    return str(options.clusterd) or clusterd.ADDRESS


@contextmanager
def _cluster(options: argparse.Namespace) -> Iterator[tuple[Api, str]]:
    with closing(load(options.kubeconfig, options.context)) as api:
        yield api, options.namespace or NAMESPACE
