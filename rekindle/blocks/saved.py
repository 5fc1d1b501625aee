"""Define Prefect blocks that several jobs share: a cluster, a checkpoint store, a policy."""

# Annotations stay values in this module, as in `rekindle.flows.train`.

import os
from contextlib import suppress
from typing import Annotated, Any, TypeVar
from uuid import UUID

import msgspec
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from rekindle import names
from rekindle.blocks.forms import BlockChoice, mistakes, setting
from rekindle.blocks.job_fields import (
    Annotations,
    CheckpointDirectory,
    MinNodes,
    Nodes,
    ProcessesPerNode,
    RecoveryPolicy,
    Spares,
    refuse_both,
)
from rekindle.checkpoints.location import S3Location, parse
from rekindle.errors import UsageError
from rekindle.recovery.policy.policy import Policy
from rekindle.recovery.policy.policy_file import policy_of_keys

_SITE = os.environ.get(names.ENV_DOCUMENTATION, "").rstrip("/")
_LOGO: Any = f"{_SITE}/_static/logo.svg" if _SITE else None
_PAGE: Any = f"{_SITE}/deploy/deploying.html#saved-blocks" if _SITE else None


class SavedCluster(Block):
    """A cluster: the numbers of nodes and ranks, and variables of all ranks."""

    _block_type_name = "Rekindle Cluster"
    _block_type_slug = "rekindle-cluster"
    _logo_url = _LOGO
    _documentation_url = _PAGE
    _code_example = """
    ```python
    from rekindle import TrainingJob, train
    from rekindle.blocks.saved import SavedCluster

    SavedCluster(nodes=2, processes_per_node=2).save("big", overwrite=True)
    train(TrainingJob(script="train.py", saved_cluster="big"))
    ```
    """

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


class KeyBlock(BaseModel):
    """A block of prefect-aws that has the key. Its package is not necessary."""

    model_config = ConfigDict(extra="forbid", title="Key from another block")

    aws: Annotated[str, BlockChoice("aws-credentials")] = Field(
        default="",
        title="AWS Credentials",
        description="A block of type AWS Credentials with access key and secret; its endpoint and "
        "region apply if the location of the checkpoints has none. Empty: none.",
    )
    minio: Annotated[str, BlockChoice("minio-credentials")] = Field(
        default="",
        title="MinIO Credentials",
        description="A block of type MinIO Credentials, in the same way. Empty: none.",
    )

    def read(self) -> "StoreKey | None":
        """Return the key of the block; None: no block is given. Raises UsageError: it has none."""
        if self.aws and self.minio:
            raise UsageError("credentials: give aws or minio, not both")
        if self.aws:
            return _store_key("aws-credentials", self.aws, "aws_access_key_id")
        return (
            _store_key("minio-credentials", self.minio, "minio_root_user") if self.minio else None
        )


class StoreKey(msgspec.Struct, frozen=True):
    """The key of an object store, and where the store is; empty: unknown."""

    access_key_id: str
    secret_access_key: str
    session_token: str = ""
    endpoint: str = ""
    region: str = ""


class SavedStore(Block):
    """A checkpoint store: its location, the interval, and its key."""

    _block_type_name = "Rekindle Checkpoint Store"
    _block_type_slug = "rekindle-checkpoint-store"
    _logo_url = _LOGO
    _documentation_url = _PAGE
    _code_example = """
    ```python
    from rekindle import TrainingJob, train
    from rekindle.blocks.job_fields import CheckpointDirectory
    from rekindle.blocks.saved import SavedStore

    checkpoint = CheckpointDirectory(path="checkpoints", every=100)
    SavedStore(checkpoint=checkpoint).save("disk", overwrite=True)
    train(TrainingJob(script="train.py", saved_store="disk"))
    ```
    """

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

    credentials: KeyBlock = Field(
        default=KeyBlock(),
        title="Key from another block",
        description="Another block with the key, instead of the key above.",
    )

    def with_key(self) -> tuple[CheckpointDirectory, dict[str, str]]:
        """Return where checkpoints are, and the key as variables for a job's agents and ranks.

        Raises UsageError: the store has two keys, or the other block has none.
        """
        given = StoreKey(
            access_key_id=self.access_key_id.get_secret_value(),
            secret_access_key=self.secret_access_key.get_secret_value(),
            session_token=self.session_token.get_secret_value(),
        )
        key = self.credentials.read()
        if key is not None and any((given.access_key_id, given.secret_access_key)):
            raise UsageError("the block has a key and names another block with a key; remove one")
        key = key or given
        variables = {
            names.ENV_STORE_ACCESS_KEY_ID: key.access_key_id,
            names.ENV_STORE_SECRET_ACCESS_KEY: key.secret_access_key,
            names.ENV_STORE_SESSION_TOKEN: key.session_token,
        }
        path = _reached_by(self.checkpoint.path, key)
        checkpoint = self.checkpoint.model_copy(update={"path": path})
        return checkpoint, {name: text for name, text in variables.items() if text}


def _reached_by(path: str, key: StoreKey) -> str:
    """Return a location with the endpoint and region of the key, if it has none itself."""
    if not path.startswith("s3://"):
        return path
    location = parse(path)
    assert isinstance(location, S3Location)
    endpoint, region = location.endpoint or key.endpoint, location.region or key.region
    return str(msgspec.structs.replace(location, endpoint=endpoint or None, region=region or None))


class SavedPolicy(Block):
    """A recovery policy: strategies, their order, their limits, and approval."""

    _block_type_name = "Rekindle Policy"
    _block_type_slug = "rekindle-policy"
    _logo_url = _LOGO
    _documentation_url = _PAGE
    _code_example = """
    ```python
    from rekindle import Policy, TrainingJob, train
    from rekindle.blocks.saved import SavedPolicy

    SavedPolicy(policy=Policy(max_restarts=5)).save("careful", overwrite=True)
    train(TrainingJob(script="train.py", saved_policy="careful"))
    ```
    """

    policy: RecoveryPolicy = setting(
        Policy(), "The recovery policy: which strategies the job may use, and its limits."
    )
    annotations: Annotations = Field(default={})

    @model_validator(mode="after")
    def _one_policy(self) -> "SavedPolicy":
        refuse_both(self.annotations, self.policy)
        return self

    def to_policy(self) -> tuple[Policy, list[str]]:
        """Return the policy, and sentences about annotations whose result surprises."""
        return policy_of_keys(self.annotations) if self.annotations else (self.policy, [])


Saved = TypeVar("Saved", SavedCluster, SavedStore, SavedPolicy)


def load(kind: type[Saved], choice: str) -> Saved:
    """Read a block. choice: its name, or its id.

    Raises UsageError: there is no such block of this type, or a value in it is not valid.
    """
    id_ = _id(choice)
    what = f"block {'with the id ' if id_ else ''}{choice!r} of type {kind._block_type_name}"
    try:
        # The base class finds the type of the block; `kind` would take the values of any type.
        block = Block.load_from_ref({"block_document_id": choice}) if id_ else kind.load(choice)
    except RuntimeError as error:  # Prefect hides the fields in the cause
        if not isinstance(error.__cause__, ValidationError):
            raise
        found = mistakes(error.__cause__)
        raise UsageError(f"{what} is not valid; correct it: {found}") from None
    except ValueError as error:
        raise UsageError(f"there is no {what}; save it, or correct its name in the job") from error
    if not isinstance(block, kind):
        raise UsageError(f"there is no {what}; pick another block")
    return block


def _id(choice: str) -> UUID | None:
    with suppress(ValueError):
        return UUID(choice)
    return None


def _store_key(slug: str, choice: str, user: str) -> StoreKey:
    """Read the key in a block of prefect-aws. user: the field with the name of the key.

    Raises UsageError: there is no such block, or it has no key.
    """
    what = f"block {choice!r} of type {slug}"
    with get_client(sync_client=True) as client:
        try:
            if id_ := _id(choice):
                document = client.read_block_document(id_)
            else:
                document = client.read_block_document_by_name(choice, slug)
        except ObjectNotFound as error:
            raise UsageError(f"credentials: there is no {what}; pick another one") from error
    data = document.data
    secret = data.get(
        user.replace("access_key_id", "secret_access_key").replace("user", "password")
    )
    if not (data.get(user) and secret):
        raise UsageError(
            f"credentials: the {what} has no access key with a secret, and Rekindle uses nothing "
            "else of it; give it both, or another block"
        )
    client_parameters = data.get("aws_client_parameters") or {}
    return StoreKey(
        access_key_id=data[user],
        secret_access_key=secret,
        session_token=data.get("aws_session_token") or "",
        endpoint=client_parameters.get("endpoint_url") or "",
        region=data.get("region_name") or "",
    )
