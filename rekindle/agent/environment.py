"""Composes the environment of a rank: torchrun's variables, MindSpore's, and Rekindle's. Pure.

Sources of MindSpore's names: mindspore/python/mindspore/parallel/cluster (2.10), and the strings of
its libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rekindle import names
from rekindle.job.ascend import ascend_environment
from rekindle.job.spec import EntryKind, JobSpec
from rekindle.protocol.agent import Spawn


def rank_environment(
    spec: JobSpec,
    spawn: Spawn,
    *,
    rank: int,
    starts: int,
    logs: Path,
    metrics_file: str,
) -> dict[str, str]:
    """Return the variables that `rank` gets in addition to its agent's environment.

    starts: how often this agent started the rank, including this start. logs: its directory.

    Source of torchrun's names: torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    per_node, world_size = spec.processes_per_node, spawn.world_size
    node, local_rank = divmod(rank, per_node)
    return spec.environment | {
        "RANK": str(spawn.first + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(spawn.first // per_node),
        "GROUP_WORLD_SIZE": str(world_size // per_node),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(spawn.first + local_rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": spawn.store_host,
        "MASTER_PORT": str(spawn.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(spawn.restart),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.policy.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job_id,
        # The ranks' store is ours, also for rank 0. A program that is not Python hosts its own.
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.entry is not EntryKind.PROGRAM),
        "TORCHELASTIC_ERROR_FILE": str(logs / names.ERROR_FILE),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        names.ENV_SCHEDULE_COUNT: str(spawn.placements),
        names.ENV_START_COUNT: str(starts),
        names.ENV_JOB_ID: spec.job_id,
        names.ENV_NODE_RANK: str(node),
        names.ENV_SLOT: str(rank),
        names.ENV_JOINS: str(int(spawn.joins)),
        names.ENV_FULL_WORLD: str(spec.world_size),
        names.ENV_STACK_FILE: str(logs / names.STACK_FILE),
        names.ENV_METRICS_FILE: metrics_file,
        names.ENV_PROFILING: str(Path(spec.directory, names.PROFILING_DIRECTORY)),
        names.ENV_SNAPSHOT_EVERY: str(spec.snapshot_every),
        names.ENV_CHECKPOINT_STORE: spec.checkpoint_store,
    }


def agent_environment(base: Mapping[str, str], spec: JobSpec) -> dict[str, str]:
    """Return the environment in which the fork server imports torch and forks ranks.

    Several processes on one node get one thread each, as under torchrun, unless the user sets
    another number. torch reads the number at its import.
    """
    environment = {**base, **spec.environment}
    environment |= ascend_environment(environment, spec.policy)
    if spec.processes_per_node > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


# Agents find ranks that end, and the gate finds ranks that hang. MindSpore must not give up before
# them. Its default limits (30 s) would also end ranks that compile for longer than others.
PATIENCE_S = 1800


def worker_environment(
    spec: JobSpec, spawn: Spawn, rank: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return MindSpore's variables for a rank. environment: the rank's other variables."""
    return {
        **scheduler_environment(spec, environment),
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": spawn.store_host,
        "MS_SCHED_PORT": str(spawn.store_port),
        "MS_NODE_ID": str(rank),
        "RANK_ID": str(rank),
        "RANK_SIZE": str(spec.world_size),
        "DEVICE_ID": str(rank % spec.processes_per_node),
    }


def scheduler_environment(spec: JobSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the common variables of scheduler and ranks; the user's own limits have priority."""
    limits = {
        "MS_TOPO_TIMEOUT": str(round(spec.policy.join_timeout_s)),
        "MS_CPU_COMM_OP_TIMEOUT": str(PATIENCE_S),
        "MS_NODE_TIMEOUT": str(PATIENCE_S),
        # By default they wait 3 to 5 s before they search for the scheduler again.
        "MS_RETRY_INTERVAL_LOWER": "1",
        "MS_RETRY_INTERVAL_UPPER": "1",
    }
    return {
        **{name: environment.get(name, value) for name, value in limits.items()},
        "MS_WORKER_NUM": str(spec.world_size),
        "MS_LOCAL_WORKER": str(spec.processes_per_node),
    }
