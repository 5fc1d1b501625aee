"""What the steps of a flow write to: a run's log in Prefect, or any other."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

Log: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any]"
