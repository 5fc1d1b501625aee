"""Define the retrain flow: data, training, evaluation, and one published checkpoint."""

# Annotations stay values in this module, as in `rekindle.flows.train`.

from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.transactions import transaction

from rekindle.blocks.forms import read
from rekindle.blocks.job import TrainingJob
from rekindle.checkpoints.location import absolute
from rekindle.errors import UsageError
from rekindle.flows.train import train_to_the_end
from rekindle.tasks import job_access as jobs
from rekindle.tasks import retraining
from rekindle.tasks.acceptance import accepted, refused
from rekindle.tasks.hooks.cancellation import OF_FLOW_PROCESS, stop_job
from rekindle.tasks.hooks.rerun import recovery_hooks
from rekindle.tasks.report import JobResult, refuse_lost
from rekindle.tasks.retraining import Retraining
from rekindle.tasks.run_watch import obeying, refuse_superseded


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
    validate_parameters=False,  # as in `rekindle.flows.train`
    on_cancellation=[stop_job],
    **recovery_hooks(OF_FLOW_PROCESS),
)
@obeying
def retrain(job: TrainingJob, around: Retraining = Retraining()) -> RetrainResult:  # noqa: B008
    """Prepare data, train, evaluate, publish the checkpoint, and start the downstream deployments.

    A rerun of the same flow run continues, and does not repeat the preparation, the training or the
    publication. Raises RejectedError: the checkpoint is not good enough. Raises RecordLostError:
    the job has succeeded, and its record is not on this machine.
    """
    try:
        around = read(Retraining, around, "around")
        job, job_id = accepted(job, around)
    except UsageError as error:
        end: RetrainResult = refused(error)
        return end
    refuse_superseded(job, job_id)
    refuse_lost(job_id, job)
    folder = Path(job.working_directory).expanduser().absolute()
    retraining.prepare(around, job_id, folder)
    result = train_to_the_end(job, job_id)
    to = absolute(around.publish_to, folder)
    # with the key of a block, which the description of an ended job has no longer
    environment = job.filled_in().unchecked_spec(job_id).environment
    directory = jobs.directory_of(job_id)
    with retraining.newest_checkpoint(directory, environment, step=result.finished) as checkpoint:
        metrics = retraining.evaluate(around, job_id, checkpoint.location, folder)
        with transaction():  # if a deployment cannot start, the announcement is withdrawn
            published = retraining.publish(checkpoint, to, metrics, environment)
            runs = retraining.tell_downstream(around.downstream, published.reference)
    return RetrainResult(result, published.reference, published.step, metrics, runs)
