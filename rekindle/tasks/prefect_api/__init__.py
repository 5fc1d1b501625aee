"""What Rekindle asks Prefect's API."""

import logging
from typing import Any, TypeAlias

# What the steps of a flow write to: a run's log in Prefect, or any other.
Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"
