"""Call Prefect's API."""

import logging
from typing import Any, TypeAlias

# The target of log messages of a flow's steps: a run's log in Prefect, or any other.
Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"
