"""Decide from a command line of torchrun which part this machine has in a job of several machines.

The rules are torchrun's, from torch/distributed/run.py and torch/distributed/elastic/rendezvous
(2.13). Rekindle's coordinator replaces torchrun's store. Pure: the caller passes the names and
addresses of the machine. docs/decisions/026-one-command-on-each-machine.md has the reasons.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rekindle import names
from rekindle.cli.run_spec import host_and_port, node_counts
from rekindle.errors import UsageError
from rekindle.job.addresses import ALL, is_loopback

ENDPOINT_PORT = 29400  # c10d_rendezvous_backend.DEFAULT_PORT
MASTER_PORT = 29500  # of --master-port in run.py
JOIN_S = 600.0  # limit of torchrun's rendezvous for machines that come late

_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


@dataclass(frozen=True)
class Meeting:
    """Where the machines of a job meet, and which of them hosts the coordinator.

    host, port: the address of the coordinator.

    hosts: whether this machine hosts the coordinator; None: the machine of the address does.

    node: the node rank of this machine; None: 0 for the host, and any free one for others.

    limit_s: how long a machine waits for the coordinator.

    ignored: a line for the user about an option without effect; empty: none.
    """

    host: str
    port: int
    hosts: bool | None
    node: int | None
    limit_s: float
    ignored: str = ""

    @property
    def listen(self) -> tuple[str, int]:
        """The address at which the host listens: on loopback only if the endpoint is there."""
        return names.LOOPBACK if is_loopback(self.host) else ALL, self.port

    @property
    def text(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"


def meeting_of(options: argparse.Namespace) -> Meeting | None:
    """Return where this machine meets the others of the job; None: it does not meet others so.

    Raises UsageError: the options contradict each other, or other machines cannot use them.
    """
    endpoint, listens = options.rdzv_endpoint, options.listen is not None
    most = node_counts(options.nnodes)[1]
    if options.node_rank is not None and not 0 <= options.node_rank < most:
        raise UsageError(
            f"--node-rank {options.node_rank}: with --nnodes {most} node ranks are 0 to {most - 1}"
        )
    if endpoint and listens:
        raise UsageError(
            "--rdzv-endpoint is the address of the coordinator, and so is --listen; give one of "
            "them"
        )
    if most == 1 or options.standalone or listens:
        return None
    if endpoint:
        return _at_endpoint(options)
    if options.master_addr or (options.master_port and options.node_rank is not None):
        host = options.master_addr or names.LOOPBACK
        port = options.master_port or MASTER_PORT
        return _meeting(options, "--master-addr", (host, port), by_rank=True)
    if options.node_rank:
        raise UsageError(
            f"--node-rank {options.node_rank} needs the address of the first machine: give "
            "--master-addr, --rdzv-endpoint or --coordinator; --listen HOST:PORT makes this "
            "machine the first"
        )
    return None


def endpoint_without_effect(options: argparse.Namespace) -> str:
    """Return a line about an endpoint that a job of one node does not use; empty: there is none."""
    host = (options.rdzv_endpoint or "").partition(":")[0]
    if options.standalone or not host or is_loopback(host):
        return ""
    if node_counts(options.nnodes)[1] > 1:
        return ""
    return "--rdzv-endpoint has no effect, because the job has one node; --nnodes gives more"


def is_here(host: str, names: Collection[str], own: Collection[str], found: Sequence[str]) -> bool:
    """Return whether this machine has a host name, or an address at any of its interfaces.

    names, own: of this machine, the latter its IPv4 addresses. found: the addresses of `host`.
    """
    return host in names or any(is_loopback(each) or each in own for each in (host, *found))


def _at_endpoint(options: argparse.Namespace) -> Meeting:
    backend = options.rdzv_backend or ""
    if backend not in ("", "c10d", "static"):
        raise UsageError(
            f"--rdzv-backend {backend} needs a server that Rekindle does not use; give "
            "--rdzv-backend c10d, and in --rdzv-endpoint an address of one of the machines"
        )
    endpoint = options.rdzv_endpoint.strip()
    if ":" not in endpoint:
        endpoint = f"{endpoint}:{ENDPOINT_PORT}"
    where = host_and_port(endpoint, "--rdzv-endpoint")
    # With torchrun's static backend the node ranks decide, also about the host. Its other backends
    # ignore them, and many scripts give the same rank on all machines.
    static = backend == "static" or (not backend and options.node_rank is not None)
    ignored = ""
    if not static and options.node_rank is not None:
        ignored = (
            f"--node-rank {options.node_rank} has no effect with --rdzv-backend c10d, as in "
            "torchrun"
        )
    return _meeting(options, "--rdzv-endpoint", where, by_rank=static, ignored=ignored)


def _meeting(
    options: argparse.Namespace,
    option: str,
    where: tuple[str, int],
    *,
    by_rank: bool,
    ignored: str = "",
) -> Meeting:
    host, port = where
    if ":" in host or host == ALL:
        raise UsageError(f"{option} {host}: give a name or an IPv4 address of the first machine")
    if not 0 < port < 65536:
        raise UsageError(
            f"{option} {host}:{port}: all machines of a job use the same port, so give 1 to 65535"
        )
    settings = _settings(options.rdzv_conf or "")
    if settings.get("store_type", "tcp") != "tcp":
        raise UsageError("--rdzv-conf store_type=file: Rekindle needs an address; give HOST:PORT")
    node = options.node_rank if by_rank else None
    hosts = None if node is None else node == 0
    if "is_host" in settings:
        hosts = _truth(settings["is_host"])
    if options.spare:
        hosts, node = False, None
    limit = settings.get("join_timeout") or settings.get("timeout") or JOIN_S
    try:
        limit_s = float(limit)
    except ValueError as error:
        raise UsageError(f"--rdzv-conf: {limit!r} is not a number of seconds") from error
    if options.join_timeout is not None:
        limit_s = options.join_timeout
    return Meeting(host, port, hosts, node, limit_s, ignored)


def _settings(text: str) -> dict[str, str]:
    pairs = [each.partition("=") for each in text.split(",") if each.strip()]
    for key, _, value in pairs:
        if not key.strip() or not value.strip():
            raise UsageError(f"--rdzv-conf {text!r}: give KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _truth(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise UsageError(f"--rdzv-conf is_host={text}: give 1 or 0")
    return text.lower() in _TRUE
