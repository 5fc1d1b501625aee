"""Define the retrain flow: data, training, evaluation, and one published checkpoint."""

# Annotations stay values in this module, as in `rekindle.flows.train`.

from dataclasses import dataclass
from pathlib import Path

from prefect import flow

from rekindle.blocks.job import TrainingJob
from rekindle.checkpoints.location import absolute
from rekindle.flows.train import train_to_the_end
from rekindle.tasks import job_access as jobs
from rekindle.tasks import retraining
from rekindle.tasks.hooks.cancellation import OF_FLOW_PROCESS, stop_job
from rekindle.tasks.hooks.rerun import recovery_hooks
from rekindle.tasks.identity import job_of_this_run
from rekindle.tasks.report import JobResult, refuse_lost
from rekindle.tasks.retraining import Retraining


@dataclass(frozen=True, slots=True)
class RetrainResult:
    """A training run and the checkpoint that it published.

    reference: the location of the published checkpoint. step: its step. metrics: what the
    evaluation measured. downstream: the names of the flow runs that received the reference.
    """

    training: JobResult
    reference: str
    step: int
    metrics: dict[str, float]
    downstream: list[str]


@flow(
    name="retrain",
    persist_result=False,
    on_cancellation=[stop_job],
    **recovery_hooks(OF_FLOW_PROCESS),
)
def retrain(job: TrainingJob, around: Retraining = Retraining()) -> RetrainResult:  # noqa: B008
    """Prepare data, train, evaluate, publish the checkpoint, and start the downstream deployments.

    A rerun of the same flow run continues, and does not repeat the preparation, the training or the
    publication. Raises RejectedError: the checkpoint is not good enough. Raises RecordLostError:
    the job has succeeded, and its record is not on this machine.
    """
    job_id = job_of_this_run(job)
    refuse_lost(job_id, job)
    folder = Path(job.working_directory).expanduser().absolute()
    retraining.prepare(around, job_id, folder)
    result = train_to_the_end(job, job_id)
    to = absolute(around.publish_to, folder)
    directory = jobs.directory_of(job_id)
    with retraining.newest_checkpoint(directory, step=result.finished) as checkpoint:
        metrics = retraining.evaluate(around, job_id, checkpoint.location, folder)
        published = retraining.publish(checkpoint, to, metrics, directory)
    runs = retraining.tell_downstream(around.downstream, published.reference)
    return RetrainResult(result, published.reference, published.step, metrics, runs)
