"""Ports and connections: their listeners, encryption and authentication."""

from __future__ import annotations

import ast

from repository import ROOT

from reference_tables.markdown import check_names, code, page, table
from rekindle import names
from rekindle.engines.kubernetes.manifests.ascend import JOB_PORT, TASKD_PORT, TTP_PORT
from rekindle.engines.kubernetes.mindcluster.clusterd import ADDRESS

_NONE = "no"
_ANY = "any free port"
_ALL = "all addresses"

# What listens: (listener, clients, protocol, address, port, encrypted, authenticated)
_LISTENERS = [
    (
        "coordinator",
        "agents, commands, flows",
        "HTTP and WebSocket",
        f"`--listen`, by default {code(names.LOOPBACK)}; in a pod {_ALL}",
        f"`--listen`, by default {_ANY}; in a pod {code(names.POD_PORT)}",
        _NONE,
        "yes: each request has the job's secret in a header, in plain text",
    ),
    (
        "ranks' store (torch's TCPStore), on the first node",
        "ranks",
        "torch's own",
        _ALL,
        f"`--master-port`, by default {_ANY}",
        _NONE,
        _NONE,
    ),
    (
        "MindSpore's scheduler, on the first node",
        "ranks",
        "MindSpore's own",
        _ALL,
        f"`--master-port`, by default {_ANY}",
        _NONE,
        _NONE,
    ),
    (
        "replica store, in each agent",
        "agents of other nodes",
        "Rekindle's own, over TCP",
        f"{_ALL}; {code(names.LOOPBACK)} if the agent's address is that",
        _ANY,
        _NONE,
        "yes: each message has an HMAC with the job's secret; a checksum (xxh3) covers the bytes "
        "of a snapshot",
    ),
    (
        "gate of a rank with MindSpore or MindIO's API",
        "ranks",
        "Rekindle's own, over TCP; also carries the state of ranks",
        _ALL,
        _ANY,
        _NONE,
        _NONE,
    ),
    (
        "node check, on each node that is checked",
        "node checks of other nodes",
        "torch's TCPStore, or Rekindle's own over TCP",
        _ALL,
        _ANY,
        _NONE,
        _NONE,
    ),
    (
        "collectives of ranks",
        "ranks",
        "gloo, NCCL or HCCL",
        "chosen by the library",
        "chosen by the library",
        _NONE,
        _NONE,
    ),
]

# What Rekindle connects to: (peer, client, protocol, port, encrypted, authenticated)
_PEERS = [
    (
        "Prefect API",
        "flows",
        "HTTP",
        "`PREFECT_API_URL`",
        "if the URL is https",
        "by Prefect's settings",
    ),
    (
        "Kubernetes API server",
        "commands, flows",
        "HTTPS",
        "by the kubeconfig",
        "yes",
        "by the kubeconfig or the service account",
    ),
    (
        "coordinator in a pod, through the API server",
        "commands, flows",
        "HTTPS to the API server, HTTP from there to the pod",
        code(names.POD_PORT),
        "only to the API server",
        "yes: the API server's own, and the job's secret",
    ),
    (
        "S3 store",
        "agents, ranks, commands",
        "HTTP",
        "by the location",
        "if the endpoint is https; `verify=` says how its certificate is checked",
        "yes: signed requests (SigV4)",
    ),
    ("ClusterD", "`rekindle kubernetes trace`", "gRPC", code(ADDRESS), _NONE, _NONE),
]

# Where the source opens a port, or connects without TLS: each has a row above.
_PLACES = {
    "agent/fork_server_process.py": "ranks' store, MindSpore's scheduler",
    "agent/snapshots/replica_server.py": "replica store",
    "coordinator/pod_process.py": "coordinator",
    "coordinator/process.py": "coordinator",
    "engines/kubernetes/mindcluster/clusterd.py": "ClusterD",
    "engines/local.py": "coordinator",
    "rank/step_vote.py": "gate of a rank",
    "training/node_check/torch_checker.py": "node check",
}
_CALLS = {"SockSite", "create_server", "insecure_channel"}


def _opens(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    binds = node.func.attr == "bind" and bool(node.args) and isinstance(node.args[0], ast.Tuple)
    return binds or node.func.attr in _CALLS


def ports() -> str:
    """Return the page of ports. Raises ValueError: a file opens a port and has no row here."""
    package = ROOT / "rekindle"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(map(_opens, ast.walk(ast.parse(path.read_text()))))
    }
    check_names("ports", found, _PLACES)
    heads = ("Listener", "Clients", "Protocol", "Address", "Port", "Encrypted", "Authenticated")
    peers = ("Server", "Client", "Protocol", "Port", "Encrypted", "Authenticated")
    mindcluster = ", ".join(code(port) for port in (JOB_PORT, TTP_PORT, TASKD_PORT))
    return page(
        "Ports",
        "Nothing between the nodes of a job is encrypted. A reader of the network sees "
        "the job's secret and the training state. Use a network that only the job's nodes can "
        "reach. In Kubernetes a NetworkPolicy closes the job's pods to others (`network_policy`), "
        "except with `host_network`.",
        "## Rekindle listens",
        table(heads, _LISTENERS),
        f"With `ascend.ports` the pods also declare the ports {mindcluster} of MindCluster. "
        "Rekindle does not listen there.",
        "Ranks and their agent use Unix sockets and shared memory, without a port.",
        "## Rekindle connects",
        table(peers, _PEERS),
    )
