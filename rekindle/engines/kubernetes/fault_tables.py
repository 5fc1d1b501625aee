"""The tables of faults, as the process reads them that steers a job in a cluster."""

from __future__ import annotations

from pathlib import Path

from rekindle.recovery.faults.tables.tables import Tables


def has_user_file(user_file: str) -> bool:
    """Whether the job has no tables of its own, or their file is on this machine too."""
    return not user_file or Path(user_file).is_file()


def load_tables(user_file: str) -> Tables:
    """Read the tables with the user's file, which is in the image of the pods, and may be here.

    The coordinator reads the file of its image, and refuses a wrong one.
    Raises UsageError: the file here cannot be used.
    """
    return Tables.load(Path(user_file) if user_file and has_user_file(user_file) else None)
