"""Create what Rekindle's flows need on a Prefect server: `rekindle setup`."""

from __future__ import annotations

import argparse
import enum
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pydantic
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import MissingFlowError, ObjectNotFound, ScriptError
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL

from rekindle.blocks.job_fields import CheckpointDirectory
from rekindle.blocks.saved import SavedCluster, SavedPolicy, SavedStore
from rekindle.checkpoints.retention import Retention
from rekindle.cli.setup import automations
from rekindle.cli.setup.deployments_file import (
    ROOT,
    SHIPPED,
    DeploymentsFile,
    read_deployments,
)
from rekindle.cli.setup.parts import (
    BlockType,
    ExampleBlock,
    Fields,
    FlowDeployment,
    Part,
    Queue,
    ServerAutomation,
    WorkPool,
)
from rekindle.errors import JobError, UsageError
from rekindle.recovery.policy.policy import Policy

EXAMPLE = "example"
_RESCUE = "rescue"  # the flow that the automations run
_ABSENT = UUID(int=0)  # a deployment that --dry-run does not create
# What Prefect raises for an entrypoint without a flow. ValueError: it has no dot and no colon.
_NO_FLOW = (AttributeError, ImportError, MissingFlowError, OSError, ScriptError, ValueError)
_KINDS: tuple[type[Block], ...] = (SavedCluster, SavedStore, SavedPolicy)


class Action(enum.Enum):
    """How setup treats an object."""

    CREATE = "created"
    LEAVE = "unchanged"
    RENEW = "updated"
    KEEP = "kept"
    REPLACE = "replaced"


_PLANNED = {
    Action.CREATE: "would create",
    Action.RENEW: "would update",
    Action.REPLACE: "would replace",
}


def run(options: argparse.Namespace) -> None:
    """Create, compare or replace each object, and print a line for it.

    Raises UsageError: an option, the file or the server's address is wrong, or the server refuses
    a request. Raises JobError: no server answers.
    """
    _check(options)
    url = PREFECT_API_URL.value()
    if not url:
        raise UsageError(
            "PREFECT_API_URL is not set; give the address of the Prefect server, for example "
            "http://127.0.0.1:4200/api"
        )
    try:
        with get_client(sync_client=True) as client:
            for part in _parts(client, options):  # refuse what is wrong before the first change
                part.wanted(), part.found()
            for part in _parts(client, options):
                _set_up(part, options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"{options.file or SHIPPED}: {first['msg']}: {first['input']!r:.200}"
        ) from error
    except httpx.TransportError as error:
        raise JobError(
            f"no Prefect server answers at {url}: {error or type(error).__name__}"
        ) from error
    except httpx.HTTPStatusError as error:
        reason = error.response.text[:300]
        raise UsageError(
            f"the Prefect server refuses {error.request.method} {error.request.url} with status "
            f"{error.response.status_code}: {reason}"
        ) from error


def _check(options: argparse.Namespace) -> None:
    for name in ("heartbeat", "pending", "rescued"):
        if not 10 <= getattr(options, name) < float("inf"):
            raise UsageError(f"--{name} {getattr(options, name):g}: give at least 10 seconds")
    if options.queue_limit < 1:
        raise UsageError(f"--queue-limit {options.queue_limit}: give at least 1")
    if not Path(options.root).is_dir():
        raise UsageError(f"--root {options.root}: there is no such folder")


def decide(
    wanted: Fields, found: Fields | None, renewed: frozenset[str], *, overwrite: bool
) -> tuple[Action, list[str]]:
    """Return what to do with an object, and the names of the fields that differ.

    renewed: fields that only Rekindle sets. found: None if there is no object.
    """
    if found is None:
        return Action.CREATE, []
    differing = [name for name, value in wanted.items() if found.get(name) != value]
    if not differing:
        return Action.LEAVE, []
    if renewed.issuperset(differing):
        return Action.RENEW, differing
    return (Action.REPLACE if overwrite else Action.KEEP), differing


def _set_up(part: Part, options: argparse.Namespace) -> None:
    action, differing = decide(
        part.wanted(), part.found(), part.renewed, overwrite=options.overwrite
    )
    if not options.dry_run:
        if action is Action.CREATE:
            part.create()
        elif action is Action.RENEW:
            part.renew()
        elif action is Action.REPLACE:
            part.replace()
    word = _PLANNED.get(action, action.value) if options.dry_run else action.value
    about = f" ({', '.join(differing)})" if differing else ""
    if action is Action.KEEP:
        about = f"; it differs in {', '.join(differing)}; --overwrite replaces it"
    print(f"{word}: {part.what}{about}", flush=True)


def _parts(client: SyncPrefectClient, options: argparse.Namespace) -> Iterator[Part]:
    """Return the objects in the order in which they need each other."""
    path = Path(options.file) if options.file else SHIPPED
    root = str(Path(options.root).absolute())
    file = read_deployments(path, {**os.environ, "REKINDLE_ROOT": root, ROOT: root})
    template = _template(options.base_job_template)
    deployments = [
        FlowDeployment(client, _flow(path, each.entrypoint), each, file.pull)
        for each in file.deployments
    ]
    counts = Counter(each.name for each in deployments)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UsageError(f"{path} has the deployment {twice[0]} twice; give each another name")
    rescues = [each for each in deployments if each.name.startswith(f"{_RESCUE}/")]
    if len(rescues) != 1:
        raise UsageError(
            f"{path} has {len(rescues)} deployments of the flow {_RESCUE}; the automations need one"
        )
    notify = _notification_block(client, options.notify) if options.notify else None
    yield from _pools(client, file, options, template)
    for kind in _KINDS:
        yield BlockType(client, kind)
    for block in _examples():
        yield ExampleBlock(client, EXAMPLE, block)
    yield from deployments
    yield from _automations(client, rescues[0].id_() or _ABSENT, notify, options)


def _pools(
    client: SyncPrefectClient,
    file: DeploymentsFile,
    options: argparse.Namespace,
    template: dict[str, Any] | None,
) -> Iterator[Part]:
    pools = [each.work_pool for each in file.deployments]
    for name in dict.fromkeys(each.name for each in pools):
        yield WorkPool(client, name, options.type, template)
    for name, queue in dict.fromkeys((each.name, each.work_queue_name) for each in pools):
        if queue != "default":
            yield Queue(client, name, queue, options.queue_limit)


def _template(path: str) -> dict[str, Any] | None:
    if not path:
        return None
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--base-job-template {path}: {error}") from error
    return found


def _flow(path: Path, entrypoint: str) -> Flow[..., Any]:
    try:
        return load_flow_from_entrypoint(entrypoint)
    except _NO_FLOW as error:
        raise UsageError(f"{path}: there is no flow {entrypoint}: {error}") from error


def _notification_block(client: SyncPrefectClient, notify: str) -> UUID:
    slug, separator, name = notify.partition("/")
    if not separator:
        raise UsageError(f"--notify {notify}: write SLUG/NAME, for example slack-webhook/ops")
    try:
        id_ = client.read_block_document_by_name(name, slug).id
    except ObjectNotFound as error:
        raise UsageError(f"--notify {notify}: there is no such block; create it first") from error
    assert id_ is not None
    return id_


def _examples() -> list[Block]:
    return [
        SavedCluster(nodes=2, processes_per_node=2),
        SavedStore(
            checkpoint=CheckpointDirectory(path="checkpoints", every=100, keep=Retention(last=3))
        ),
        SavedPolicy(policy=Policy(max_restarts=3)),
    ]


def _automations(
    client: SyncPrefectClient, rescue: UUID, notify: UUID | None, options: argparse.Namespace
) -> Iterator[Part]:
    flows = options.flows
    wanted = [
        automations.crash_silent_runs(flows, options.heartbeat),
        automations.crash_pending_runs(flows, options.pending),
        automations.rescue_runs(rescue, flows),
        automations.rescue_runs_again(rescue, flows, options.rescued),
    ]
    if notify is not None:
        wanted.append(automations.tell_of_incidents(notify))
    for each in wanted:
        yield ServerAutomation(client, each)
