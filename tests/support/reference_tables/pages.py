"""The generated pages, by their file names."""

from __future__ import annotations

from collections.abc import Callable

from repository import ROOT

from reference_tables import (
    commands,
    environment,
    exit_statuses,
    files,
    habits,
    journal,
    ports,
    session,
    settings,
    specification,
    states,
)

FOLDER = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands.commands,
    "environment.md": environment.environment,
    "exit-statuses.md": exit_statuses.exit_statuses,
    "job-directory.md": files.files,
    "job.md": settings.job,
    "journal-events.md": journal.events,
    "policy-fields.md": settings.policy,
    "ports.md": ports.ports,
    "session-arguments.md": session.session,
    "specification.md": specification.specification,
    "states.md": states.states,
    habits.PATH: habits.scripts,
}
