"""Read the deployments that `rekindle setup` creates, from a file in the form of prefect.yaml.

The file has the part of Prefect's form that setup carries out. Any other field is refused, because
setup would leave it out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rekindle.user_file import Place, place_of
from rekindle.yaml_file import Document

SHIPPED = Path(__file__).with_name("prefect.yaml")
ROOT = "root.stdout"  # what the build step `pwd` of the shipped file prints for `prefect deploy`
_PWD = {
    "prefect.deployments.steps.run_shell_script": {
        "id": "root",
        "script": "pwd",
        "stream_output": False,
    }
}
_VARIABLE = re.compile(r"\{\{\s*(?:\$(?=\w+\s)|(?=root\.stdout\s))([\w.]+)\s*\}\}")


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times at which Prefect starts a flow run."""

    cron: str
    timezone: str = "UTC"
    active: bool = True


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The work pool of a deployment, its queue, and values for the pool's template."""

    name: str
    work_queue_name: str = "default"
    job_variables: dict[str, Any] = {}


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One deployment of a flow. entrypoint: `module.flow`, or `path/of/file.py:flow`."""

    name: str
    entrypoint: str
    work_pool: Pool
    description: str = ""
    tags: list[str] = []
    parameters: dict[str, Any] = {}
    schedules: list[Schedule] = []


class DeploymentsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A complete file. definitions: what YAML's aliases stand for. build: only Prefect runs it."""

    deployments: list[Deployment]
    name: str = ""
    prefect_version: str = ""
    definitions: dict[str, Any] = {}
    build: list[dict[str, Any]] = []
    pull: list[dict[str, Any]] = []


def read_deployments(path: Path, variables: Mapping[str, str]) -> DeploymentsFile:
    """Return the deployments of a file, with each `{{ $NAME }}` replaced by a variable.

    Raises UsageError: the file is invalid, or a variable has no value.
    """
    document = Document(path, "deployments file")
    value = _filled_in(document.value, (), variables, document)
    try:
        found = msgspec.convert(value, DeploymentsFile)
    except msgspec.ValidationError as error:
        problem, place = place_of(error)
        where = ".".join(map(str, place))
        raise document.error(f"{where}: {problem}" if where else problem, place, problem) from error
    for number, step in enumerate(found.build):
        if step != _PWD:
            raise document.error("setup runs no build step; remove it", ("build", number))
    _check_names(found, document)
    return found


def _filled_in(value: Any, place: Place, variables: Mapping[str, str], document: Document) -> Any:
    if isinstance(value, dict):
        return {
            key: _filled_in(each, (*place, key), variables, document) for key, each in value.items()
        }
    if isinstance(value, list):
        return [
            _filled_in(each, (*place, index), variables, document)
            for index, each in enumerate(value)
        ]
    if not isinstance(value, str):
        return value
    for name in _VARIABLE.findall(value):
        if not variables.get(name):
            raise document.error(f"the variable {name} has no value; set it", place)
    found = _VARIABLE.sub(lambda match: variables[match[1]], value)
    if "{{" in found:
        raise document.error(f"{value!r}: write a variable as {{{{ $NAME }}}}", place)
    return found


def _check_names(file: DeploymentsFile, document: Document) -> None:
    seen: set[tuple[str, str]] = set()
    for number, each in enumerate(file.deployments):
        key = (each.entrypoint, each.name)
        if key in seen:
            problem = f"{each.entrypoint} has two deployments named {each.name!r}"
            raise document.error(problem, ("deployments", number))
        seen.add(key)
