"""Opens the bucket of a location through boto3. No other module imports boto3."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rekindle import names
from rekindle.checkpoints.location import S3Location
from rekindle.checkpoints.s3.client import THREADS, Bucket
from rekindle.errors import UsageError, extra_of

CONNECT_TIMEOUT_S = 10.0  # also for the server to accept each 256 KiB
READ_TIMEOUT_S = 30.0  # between two bytes of an answer


def connect(location: S3Location, environment: Mapping[str, str]) -> Bucket:
    """Return the bucket of this location. The function does not make a request.

    Raises UsageError: boto3 is not installed, or the environment or the location lacks something.
    """
    try:
        import boto3
        import botocore.config
        import botocore.exceptions
        import urllib3
    except ModuleNotFoundError as error:
        raise extra_of(error) from error
    if isinstance(location.verify, str) and not Path(location.verify).is_file():
        raise UsageError(
            f"the file of certificate authorities {location.verify} (verify=) does not exist"
        )
    config = botocore.config.Config(
        # The signature covers the body's MD5, with and without TLS, so a SHA-256 of the body is
        # unnecessary.
        s3={"addressing_style": location.addressing, "payload_signing_enabled": False},
        signature_version="s3v4",
        retries={"total_max_attempts": 1},  # `Bucket` repeats requests
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=2 * THREADS,
        # Old servers refuse other checksums than MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    if not location.verify:
        # The user has turned verification off, so a warning with every request does not help.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    # Below INFO, botocore logs requests with their tokens.
    logger = logging.getLogger("botocore")
    logger.setLevel(max(logger.getEffectiveLevel(), logging.INFO))
    try:
        session = boto3.session.Session(**_credentials(environment))
        client = session.client(
            "s3",
            region_name=location.region or session.region_name or "us-east-1",
            endpoint_url=location.endpoint,
            verify=location.verify,
            config=config,
        )
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise UsageError(
            f"Rekindle cannot configure boto3 for {location} ({type(error).__name__}); check the "
            "profile and region in the environment"
        ) from None
    return Bucket(location, client)


def _credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the store's credentials in the environment; empty: boto3 looks for credentials.

    Raises UsageError: the environment has only a part of them.
    """
    wanted = {
        "aws_access_key_id": names.ENV_STORE_ACCESS_KEY_ID,
        "aws_secret_access_key": names.ENV_STORE_SECRET_ACCESS_KEY,
        "aws_session_token": names.ENV_STORE_SESSION_TOKEN,
    }
    given = {name: environment[env] for name, env in wanted.items() if environment.get(env)}
    missing = [env for name, env in list(wanted.items())[:2] if name not in given]
    if given and missing:
        raise UsageError(
            f"the environment has only a part of the store's credentials; set {missing[0]} as well"
        )
    return given
