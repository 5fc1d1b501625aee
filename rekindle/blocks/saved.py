"""Define Prefect blocks that several jobs share: a cluster, a checkpoint store, a policy."""

# Annotations stay values in this module, as in `rekindle.flows.train`.

from typing import TypeVar

from prefect.blocks.core import Block
from prefect.types import SecretDict
from pydantic import Field, SecretStr, ValidationError

from rekindle import names
from rekindle.blocks.forms import mistakes, setting
from rekindle.blocks.job_fields import (
    CheckpointDirectory,
    MinNodes,
    Nodes,
    ProcessesPerNode,
    RecoveryPolicy,
    Spares,
)
from rekindle.errors import UsageError
from rekindle.recovery.policy.policy import Policy


class SavedCluster(Block):
    """A cluster: the numbers of nodes and ranks, and variables of all ranks."""

    _block_type_name = "Rekindle Cluster"
    _block_type_slug = "rekindle-cluster"

    nodes: Nodes = 1
    processes_per_node: ProcessesPerNode = 1
    min_nodes: MinNodes = 0
    spares: Spares = 0
    environment: SecretDict = Field(
        default=SecretDict({}),
        description="Environment variables of each rank, such as the keys of a data store or of an "
        "experiment tracker. Prefect stores them as secrets; a variable of the job replaces one of "
        "the same name here. Another value here does not make another job.",
    )


class SavedStore(Block):
    """A checkpoint store: its location, the interval, and its key."""

    _block_type_name = "Rekindle Checkpoint Store"
    _block_type_slug = "rekindle-checkpoint-store"

    checkpoint: CheckpointDirectory = Field(
        default=CheckpointDirectory(),
        description="Where the job writes checkpoints, and how often.",
    )
    job_id: str = Field(
        default="",
        description="Id of each job that uses this store and gives no job_id of its own, such as "
        "charlm-{flow_run.root_id}. Empty: Rekindle derives the ids.",
    )
    access_key_id: SecretStr = Field(
        default=SecretStr(""),
        description="Access key of an object store. Empty: the client uses the key of the "
        "environment, the profile or the machine's role.",
    )
    secret_access_key: SecretStr = Field(
        default=SecretStr(""), description="Secret of the access key."
    )
    session_token: SecretStr = Field(
        default=SecretStr(""), description="Session token of a temporary access key."
    )

    def credentials(self) -> dict[str, str]:
        """Return the key as environment variables for a job's agents and ranks."""
        given = {
            names.ENV_STORE_ACCESS_KEY_ID: self.access_key_id,
            names.ENV_STORE_SECRET_ACCESS_KEY: self.secret_access_key,
            names.ENV_STORE_SESSION_TOKEN: self.session_token,
        }
        return {name: text for name, secret in given.items() if (text := secret.get_secret_value())}


class SavedPolicy(Block):
    """A recovery policy: strategies, their order, their limits, and approval."""

    _block_type_name = "Rekindle Policy"
    _block_type_slug = "rekindle-policy"

    policy: RecoveryPolicy = setting(
        Policy(), "The recovery policy: which strategies the job may use, and its limits."
    )


Saved = TypeVar("Saved", SavedCluster, SavedStore, SavedPolicy)


def load(kind: type[Saved], name: str) -> Saved:
    """Read a block. Raises UsageError: no block has that name, or a value in it is not valid."""
    what = f"block {name!r} of type {kind._block_type_name}"
    try:
        block = kind.load(name)
    except RuntimeError as error:  # Prefect hides the fields in the cause
        if not isinstance(error.__cause__, ValidationError):
            raise
        found = mistakes(error.__cause__)
        raise UsageError(f"{what} is not valid; correct it: {found}") from None
    except ValueError as error:
        raise UsageError(f"there is no {what}; save it, or correct its name in the job") from error
    assert isinstance(block, kind)
    return block
