"""Log in to an API server by a kubeconfig or as a pod, and again when a token expires."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import config
from kubernetes.client import Configuration
from kubernetes.client.rest import RESTClientObject
from kubernetes.config import KUBE_CONFIG_DEFAULT_LOCATION
from kubernetes.config.config_exception import ConfigException

from rekindle.engines.kubernetes.client.api_errors import ApiError
from rekindle.errors import UsageError

_UNREADABLE = (
    *(ConfigException, yaml.YAMLError, OSError),
    *(ValueError, TypeError, AttributeError, KeyError),
)
_USUAL = "KUBECONFIG, ~/.kube/config, or the service account of a pod"


class Credentials:
    """The official client's settings for a server and for the user of this process.

    The client repeats a kubeconfig's command when the token expires, and reads a service account's
    token every minute. It keeps other tokens forever. Raises UsageError: there is no cluster, or
    its file, context or user is invalid.

    trouble: the error of the last attempt to read the credentials; "": there was no error.
    """

    def __init__(self, kubeconfig: str = "", context: str = "") -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self.configuration = Configuration()
        self.trouble = ""
        where = kubeconfig or _USUAL
        try:
            self._read()
        except _UNREADABLE as error:
            raise UsageError(
                f"Rekindle found no Kubernetes cluster: {error} (it read {where}); give "
                "--kubeconfig FILE and --context NAME"
            ) from error
        settings = self.configuration
        if self.trouble and not (settings.api_key or settings.cert_file):
            raise UsageError(f"the user of the kubeconfig cannot log in: {self.trouble} ({where})")

    def connections(self) -> urllib3.PoolManager:
        """Return a pool without open connections that uses the settings for proxies and TLS."""
        pool: urllib3.PoolManager = RESTClientObject(self.configuration).pool_manager
        return pool

    def headers(self) -> dict[str, str]:
        """Return the current headers of authentication.

        Raises ApiError: this process has no valid credentials.
        """
        try:
            with self._listening():
                proofs: dict[str, Any] = dict(self.configuration.auth_settings())
        except _UNREADABLE as error:
            raise ApiError(
                f"Rekindle has no valid credentials for {self.configuration.host}: {error}"
            ) from error
        return {p["key"]: p["value"] for p in proofs.values() if p["in"] == "header" and p["value"]}

    def renew(self) -> bool:
        """Read all settings again after the server refused them; return whether the key differs.

        If the settings are unreadable now, for example during a write, the old ones stay.
        """
        before = dict(self.configuration.api_key)
        try:
            self._read()
        except _UNREADABLE as error:
            self.trouble = str(error)
        return bool(self.configuration.api_key != before)

    def _read(self) -> None:
        with self._listening():
            if self._kubeconfig or self._context or _has_file():
                config.load_kube_config(
                    self._kubeconfig or None,
                    self._context or None,
                    client_configuration=self.configuration,
                )
            else:
                config.load_incluster_config(client_configuration=self.configuration)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Record log messages about a user's command; the client reports errors only there."""
        ear = _Ear()
        logging.getLogger().addHandler(ear)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(ear)
            # On a terminal the command writes its messages to the terminal.
            above = " (its messages are above)" if ear.messages and sys.stdout.isatty() else ""
            self.trouble = "; ".join(ear.messages) + above


class _Ear(logging.Handler):
    """Records the messages of the client's reader of kubeconfigs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.module == "kube_config":
            self.messages.append(record.getMessage())


def _has_file() -> bool:
    paths = KUBE_CONFIG_DEFAULT_LOCATION.split(os.pathsep)
    return any(Path(path).expanduser().exists() for path in paths)
