"""Define the check-nodes flow: find unhealthy nodes while no training uses them."""

# Annotations stay values in this module, as in `rekindle.flows.train`.

from typing import Any

from prefect import flow

from rekindle.blocks.job import TrainingJob
from rekindle.blocks.job_fields import KubernetesPods, NodeCheck, Nodes, ProcessesPerNode
from rekindle.errors import JobFailedError, UsageError
from rekindle.flows.train import train_to_the_end
from rekindle.tasks.acceptance import accepted, refused
from rekindle.tasks.hooks.cancellation import OF_FLOW_PROCESS, stop_job
from rekindle.tasks.hooks.rerun import recovery_hooks
from rekindle.tasks.report import report_nodes
from rekindle.tasks.run_watch import obeying

NAME = "check-nodes"


@flow(
    name=NAME,
    persist_result=False,
    on_cancellation=[stop_job],
    **recovery_hooks(OF_FLOW_PROCESS),
)
@obeying
def check_nodes(
    nodes: Nodes,
    processes_per_node: ProcessesPerNode = 1,
    node_check: NodeCheck = NodeCheck(),  # noqa: B008
    kubernetes: KubernetesPods | None = None,
) -> list[dict[str, Any]]:
    """Measure devices and links of nodes, isolate the faulty ones, and show all of them.

    The flow runs a normal job that does not train. With `exclude_straggler` it also isolates slow
    nodes. Raises JobFailedError: fewer nodes than `nodes` could take part.
    """
    job = TrainingJob(
        name=NAME,
        module="rekindle.training.node_check",
        working_directory="/",
        nodes=nodes,
        processes_per_node=processes_per_node,
        snapshot_every=0,
        node_check=node_check.model_copy(update={"enabled": True}),
        kubernetes=kubernetes,
    )
    try:
        job, job_id = accepted(job)
    except UsageError as error:
        end: list[dict[str, Any]] = refused(error)
        return end
    try:
        train_to_the_end(job, job_id)
    except JobFailedError:
        report_nodes(job_id)
        raise
    return report_nodes(job_id)
