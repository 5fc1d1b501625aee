"""Read the tables of faults for a process that steers a job in a cluster."""

from __future__ import annotations

from pathlib import Path

from rekindle.recovery.faults.tables.tables import Tables


def has_user_file(user_file: str) -> bool:
    """Return whether the job has no tables of its own, or this machine also has their file."""
    return not user_file or Path(user_file).is_file()


def load_tables(user_file: str) -> Tables:
    """Read the tables, and the user's file if this machine has it; the image of the pods has it.

    The coordinator reads the file of its image, and refuses an invalid one.

    Raises UsageError: the file here is invalid.
    """
    return Tables.load(Path(user_file) if user_file and has_user_file(user_file) else None)
