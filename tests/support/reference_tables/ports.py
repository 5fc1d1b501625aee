"""The page of ports and connections: listeners, encryption and authentication."""

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

# Listeners: (listener, clients, protocol, address, port, encrypted, authenticated)
_LISTENERS = [
    (
        "coordinator",
        "agents, commands, flows",
        "HTTP and WebSocket",
        f"`--listen`, by default {code(names.LOOPBACK)}; in a pod, and with `--rdzv-endpoint` or "
        f"`--master-addr` of several nodes, {_ALL}",
        f"`--listen`, by default {_ANY}; in a pod {code(names.POD_PORT)}; that of "
        "`--rdzv-endpoint` (29400) or `--master-addr` (29500)",
        _NONE,
        "yes: each request has the job's secret in plain text. Agents send `Authorization: Bearer "
        f"SECRET`, commands and flows send `{names.HEADER_SECRET}: Bearer SECRET`. The coordinator "
        "accepts both headers from all clients",
    ),
    (
        "metrics, in the coordinator",
        "Prometheus",
        "HTTP, read-only",
        f"{code(names.ENV_METRICS_LISTEN)}, by default {code(names.LOOPBACK)}",
        f"{code(names.ENV_METRICS_LISTEN)}; without it there is no listener",
        _NONE,
        _NONE,
    ),
    (
        "ranks' store (torch's TCPStore), on one node",
        "ranks",
        "torch's own",
        _ALL,
        f"`--master-port`, by default {_ANY}",
        _NONE,
        _NONE,
    ),
    (
        "MindSpore's scheduler, on one node",
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
        "gate (the vote before each step), in each rank with MindSpore or MindIO's API",
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

# Servers to which Rekindle connects: (peer, client, protocol, port, encrypted, authenticated)
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
        "flows; `rekindle kubernetes`, `nodes` and `release-node`",
        "HTTPS",
        "by the kubeconfig",
        "yes",
        "by the kubeconfig or the service account",
    ),
    (
        "coordinator in a pod, through the API server",
        "flows outside of the cluster",
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
        "if the endpoint is https; `verify=` sets how the certificate is checked",
        "yes: signed requests (SigV4)",
    ),
    ("ClusterD", "`rekindle kubernetes trace`, `signals`", "gRPC", code(ADDRESS), _NONE, _NONE),
]

# Cases for ports that a user sets, and for the secret.
_CASES = [
    (
        "`--listen HOST:PORT`, and the port is in use or the address does not exist",
        "the command ends with exit status 2 before anything starts; the message has address and "
        "port",
    ),
    ("`--listen` without HOST or PORT, or a port above 65535", "exit status 2"),
    (
        "`--rdzv-endpoint HOST:PORT`, or `--master-addr` with `--master-port`, and several nodes",
        "the coordinator has this port. If another process of the host's machine has it, the "
        "command joins there; with `--node-rank 0` or `is_host=1` it ends with exit status 2",
    ),
    (
        "`--master-port PORT` with one node or with `--listen`, and the port is in use on the node "
        "of the store",
        "the job fails with exit status 1 and the port in the reason. No rank starts, and "
        "`max_restarts` does not apply",
    ),
    (
        "a coordinator that is replaced",
        "it listens at the same address and port, so agents find it again",
    ),
    (
        "a request to the coordinator without the job's secret, or with a wrong one",
        "HTTP status 401; the command ends with exit status 1. Commands read the secret from the "
        "file `secret` in the job directory. A machine that joins a job gets it in "
        f"`{names.ENV_SECRET}`. A job of `--rdzv-endpoint` or `--master-addr` without this "
        "variable has no secret, and refuses nobody who has none",
    ),
    (
        "a caller of the replica store without the job's secret",
        "the store closes the connection and sends nothing",
    ),
    (
        "several nodes without Kubernetes",
        "give all of them `--rdzv-endpoint HOST:PORT`; or give the first one `--listen "
        "0.0.0.0:PORT` or its own address, and the others `--coordinator HOST:PORT`",
    ),
]
_ALLOWED = [
    (
        "the coordinator's",
        "the job's own pods, pods of its namespace with the label `rekindle.dev/role: flow`, and "
        "`coordinator.peers` (pods by `namespace` and `labels`, or addresses by `cidr`)",
        code(names.POD_PORT),
    ),
    ("those of its nodes", "the job's own pods", "all"),
]

# Source files that open a port, or connect without TLS. Each has a row above.
_PLACES = {
    "agent/fork_server_process.py": "ranks' store, MindSpore's scheduler",
    "agent/snapshots/replica_server.py": "replica store",
    "coordinator/metrics.py": "metrics",
    "coordinator/pod_process.py": "coordinator",
    "coordinator/process.py": "coordinator",
    "engines/kubernetes/mindcluster/clusterd.py": "ClusterD",
    "engines/local.py": "coordinator",
    "rank/step_vote.py": "gate of a rank",
    "training/node_check/torch_checker.py": "node check",
}
_CALLS = {"SockSite", "TCPSite", "create_server", "insecure_channel"}


def _opens(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    binds = node.func.attr == "bind" and bool(node.args) and isinstance(node.args[0], ast.Tuple)
    return binds or node.func.attr in _CALLS


def ports() -> str:
    """Return the page of ports.

    Raises ValueError: a file that opens a port has no row here.
    """
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
        "This page lists the ports of a job, the servers to which its processes connect, and the "
        "protection of each connection. [Running](../operate/running.md) has the "
        "options, and [Kubernetes](../deploy/kubernetes.md#network-and-rights) the rights.",
        "Nothing between the nodes of a job is encrypted, and no option changes this. A reader of "
        "the network sees the job's secret and the training state. Use a network that only the "
        "job's nodes can reach. All ports are TCP; the coordinator listens at IPv4 addresses only.",
        "## Rekindle listens",
        table(heads, _LISTENERS),
        f"With `ascend.ports` the pods also declare the ports {mindcluster} of MindCluster. "
        "Rekindle does not listen there.",
        "Ranks and their agent use Unix sockets and shared memory, without a port.",
        "**Node of the ranks' store.** The agent of the lowest node rank starts the store, or the "
        "scheduler, in a process that its fork server forks. If this node is lost, the agent of "
        "the lowest node rank that is left starts a new one for the next generation, and later "
        "ones stay on that node. The ranks get its address with the generation, so no rank "
        "restarts for it; with MindSpore all ranks restart after each lost node. With one node or "
        "with `--listen`, `--master-addr` is the address of each store of the job: give it only if "
        "the node of the first store cannot be lost.",
        "Nodes of a job must reach each other at every port of this table, not only at fixed "
        "ones: a firewall between them must be open for all TCP ports. A client outside of the "
        "job needs only the coordinator.",
        "## Fixed ports and errors",
        table(("Case", "Result"), _CASES),
        "## NetworkPolicy in Kubernetes",
        "`network_policy` is on by default. It makes two NetworkPolicies for incoming "
        "connections. With `host_network` there are none, because they have no effect on the "
        "network of the hosts. They also need a network plugin that enforces them.",
        table(("Pods of the job", "Who may connect", "To which ports"), _ALLOWED),
        "## Rekindle connects",
        table(peers, _PEERS),
        "A flow outside of the cluster uses the API server's proxy for Services, so no port has to "
        "be exposed. If a NetworkPolicy is enforced, add the addresses of the API server to "
        "`coordinator.peers`. The commands `status`, `stop`, `approve`, `profile`, `report-fault` "
        "and `inject` always connect to the coordinator directly, in a cluster by the name of its "
        "Service: run them in a pod there, such as the flow's "
        "(`kubectl exec FLOW_POD -- rekindle status JOB`).",
    )
