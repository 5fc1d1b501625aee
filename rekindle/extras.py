"""The extras of the distribution: what a command needs besides a light installation."""

from __future__ import annotations

from rekindle.errors import UsageError

_EXTRAS = {
    "boto3": "s3",
    "botocore": "s3",
    "grpc": "mindcluster",
    "httpx": "prefect",
    "kubernetes": "kubernetes",
    "matplotlib": "prefect",
    "mindspore": "mindspore",
    "prefect": "prefect",
    "pydantic": "prefect",
    "torch": "torch",
    "urllib3": "kubernetes",
}


def extra_of(error: ModuleNotFoundError) -> UsageError:
    """Return the error that names the extra to install. Raises `error`: no extra has the module."""
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRAS:
        raise error
    return UsageError(f"{module} is not installed: pip install 'rekindle[{_EXTRAS[module]}]'")
