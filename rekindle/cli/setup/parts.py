"""Define the objects of a Prefect server that `rekindle setup` compares, creates and replaces.

Each part has the fields that setup sets (`wanted`), and those that the server has (`found`). Setup
ignores all other fields.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type
from pydantic_core import to_jsonable_python

from rekindle.cli.setup.deployments_file import Deployment
from rekindle.errors import UsageError

Fields = Mapping[str, Any]


class Part(ABC):
    """One object on the server. `what` names it; `renewed`: fields that no person edits."""

    renewed: frozenset[str] = frozenset()

    def __init__(self, client: SyncPrefectClient, what: str) -> None:
        self.client = client
        self.what = what

    @abstractmethod
    def wanted(self) -> Fields:
        """Return the fields that setup sets."""

    @abstractmethod
    def found(self) -> Fields | None:
        """Return the same fields of the object that the server has; None: it has none."""

    @abstractmethod
    def create(self) -> None:
        """Create the object."""

    @abstractmethod
    def replace(self) -> None:
        """Give the object the wanted fields."""

    def renew(self) -> None:
        """Give the object the wanted fields of `renewed`."""
        self.replace()


class WorkPool(Part):
    """A work pool. template: of its jobs; None: the one of its type, which people may change."""

    def __init__(
        self, client: SyncPrefectClient, name: str, kind: str, template: dict[str, Any] | None
    ) -> None:
        super().__init__(client, f"work pool {name}")
        self._name, self._kind, self._template = name, kind, template

    def wanted(self) -> Fields:
        return {} if self._template is None else {"template": self._template}

    def found(self) -> Fields | None:
        try:
            pool = self.client.read_work_pool(self._name)
        except ObjectNotFound:
            return None
        if pool.type != self._kind:
            raise UsageError(
                f"work pool {self._name!r} has the type {pool.type}, but --type is {self._kind}; "
                "give its type, or another name in the file of deployments"
            )
        return {"template": pool.base_job_template}

    def create(self) -> None:
        template = self._template
        if template is None:
            of_type = get_default_base_job_template_for_infrastructure_type(self._kind)
            template = asyncio.run(of_type)
        if template is None:
            raise UsageError(f"--type {self._kind}: Prefect has no work pool of this type")
        new = WorkPoolCreate(name=self._name, type=self._kind, base_job_template=template)
        self.client.create_work_pool(new)

    def replace(self) -> None:
        new = WorkPoolUpdate(base_job_template=self._template)
        self.client.update_work_pool(self._name, new)


class Queue(Part):
    """A queue of a work pool, with a limit of flow runs."""

    def __init__(self, client: SyncPrefectClient, pool: str, name: str, limit: int) -> None:
        super().__init__(client, f"queue {pool}/{name}")
        self._pool, self._name, self._limit = pool, name, limit

    def wanted(self) -> Fields:
        return {"limit": self._limit}

    def found(self) -> Fields | None:
        try:
            queue = self.client.read_work_queue_by_name(self._name, work_pool_name=self._pool)
        except ObjectNotFound:
            return None
        return {"limit": queue.concurrency_limit}

    def create(self) -> None:
        self.client.create_work_queue(
            self._name, concurrency_limit=self._limit, work_pool_name=self._pool
        )

    def replace(self) -> None:
        queue = self.client.read_work_queue_by_name(self._name, work_pool_name=self._pool)
        self.client.update_work_queue(queue.id, concurrency_limit=self._limit)


class BlockType(Part):
    """A type of block, and the form of this version of Rekindle."""

    renewed = frozenset({"form"})

    def __init__(self, client: SyncPrefectClient, kind: type[Block]) -> None:
        super().__init__(client, f"block type {kind.get_block_type_slug()}")
        self._kind = kind

    def wanted(self) -> Fields:
        return {"form": True}

    def found(self) -> Fields | None:
        try:
            self.client.read_block_type_by_slug(self._kind.get_block_type_slug())
        except ObjectNotFound:
            return None
        try:
            self.client.read_block_schema_by_checksum(self._kind._calculate_schema_checksum())
        except ObjectNotFound:
            return {"form": False}
        return {"form": True}

    def create(self) -> None:
        self._kind.register_type_and_schema()

    def replace(self) -> None:
        self.create()


class ExampleBlock(Part):
    """A block with example values. It shows the fields, and people change it or copy it.

    An existing block is the person's: its jobs may use it, so setup never replaces it.
    """

    def __init__(self, client: SyncPrefectClient, name: str, block: Block) -> None:
        self._slug = block.get_block_type_slug()
        super().__init__(client, f"block {self._slug}/{name}")
        self._name, self._block = name, block

    def wanted(self) -> Fields:
        return {}

    def found(self) -> Fields | None:
        try:
            self.client.read_block_document_by_name(self._name, self._slug)
        except ObjectNotFound:
            return None
        return self.wanted()

    def create(self) -> None:
        self._block.save(self._name)

    def replace(self) -> None:
        raise AssertionError(f"{self.what} is the person's")


class FlowDeployment(Part):
    """A deployment of a flow."""

    renewed = frozenset({"form"})

    def __init__(
        self,
        client: SyncPrefectClient,
        flow: Flow[..., Any],
        deployment: Deployment,
        pull: list[dict[str, Any]],
    ) -> None:
        self.name = f"{flow.name}/{deployment.name}"
        super().__init__(client, f"deployment {self.name}")
        self._flow, self._deployment, self._pull = flow, deployment, pull
        self._schedules = [
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=each.cron, timezone=each.timezone), active=each.active
            )
            for each in deployment.schedules
        ]

    def id_(self) -> UUID | None:
        """Return the id of the deployment; None: the server has none."""
        try:
            return self.client.read_deployment_by_name(self.name).id
        except ObjectNotFound:
            return None

    def wanted(self) -> Fields:
        new = self._deployment
        return {
            "entrypoint": new.entrypoint,
            "description": new.description,
            "tags": sorted(new.tags),
            "parameters": to_jsonable_python(new.parameters),
            "pool": new.work_pool.name,
            "queue": new.work_pool.work_queue_name,
            "job variables": to_jsonable_python(new.work_pool.job_variables),
            "pull steps": to_jsonable_python(self._pull),
            "schedules": sorted(
                ((each.cron, each.timezone, each.active) for each in new.schedules), key=str
            ),
            "form": self._form(),
        }

    def found(self) -> Fields | None:
        try:
            found = self.client.read_deployment_by_name(self.name)
        except ObjectNotFound:
            return None
        return {
            "entrypoint": found.entrypoint,
            "description": found.description or "",
            "tags": sorted(found.tags),
            "parameters": found.parameters,
            "pool": found.work_pool_name,
            "queue": found.work_queue_name,
            "job variables": found.job_variables,
            "pull steps": found.pull_steps or [],
            "schedules": sorted(
                (
                    (each.schedule.cron, each.schedule.timezone, each.active)
                    if isinstance(each.schedule, CronSchedule)
                    else each.schedule.model_dump()
                    for each in found.schedules
                ),
                key=str,
            ),
            "form": found.parameter_openapi_schema,
        }

    def create(self) -> None:
        new = self._deployment
        self.client.create_deployment(
            self.client.create_flow_from_name(self._flow.name),
            new.name,
            entrypoint=new.entrypoint,
            description=new.description,
            tags=new.tags,
            parameters=new.parameters,
            work_pool_name=new.work_pool.name,
            work_queue_name=new.work_pool.work_queue_name,
            job_variables=new.work_pool.job_variables,
            pull_steps=self._pull or None,
            schedules=self._schedules,
            parameter_openapi_schema=self._form(),
            enforce_parameter_schema=True,
        )

    def replace(self) -> None:
        self.create()  # the server replaces a deployment of the same flow and name

    def renew(self) -> None:
        # Another request would remove limits and parts of schedules that a person has set.
        known = self.id_()
        assert known is not None
        self.client.update_deployment(
            known, DeploymentUpdate(parameter_openapi_schema=self._form())
        )

    def _form(self) -> dict[str, Any]:
        form: dict[str, Any] = parameter_schema(self._flow).model_dump_for_openapi()
        return form


class ServerAutomation(Part):
    """An automation. The server may have several of one name; setup leaves one."""

    def __init__(self, client: SyncPrefectClient, automation: AutomationCore) -> None:
        super().__init__(client, f"automation {automation.name!r}")
        self._new = automation

    def wanted(self) -> Fields:
        return {**self._fields(self._new), "number": 1}

    def found(self) -> Fields | None:
        found = self._known()
        return {**self._fields(found[0]), "number": len(found)} if found else None

    def create(self) -> None:
        self.client.create_automation(self._new)

    def replace(self) -> None:
        known = self._known()
        self.client.create_automation(self._new)
        for each in known:
            self.client.delete_automation(each.id)

    def _known(self) -> list[Automation]:
        return self.client.read_automations_by_name(self._new.name)

    def _fields(self, automation: AutomationCore) -> Fields:
        return {
            "description": automation.description,
            "enabled": automation.enabled,
            "trigger": automation.trigger.model_dump(exclude={"id"}),
            "actions": [each.model_dump() for each in automation.actions],
        }
