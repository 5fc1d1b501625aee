"""A location: the text that names a store of checkpoints. It does not contain a secret.

/an/absolute/path
s3://bucket/prefix?endpoint=https://host:port&region=x&addressing=path&verify=/a/ca.pem
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec

from rekindle.errors import UsageError

Addressing: TypeAlias = Literal["auto", "path", "virtual"]

_SCHEME: Final = "s3://"
_SETTINGS: Final = ("endpoint", "region", "addressing", "verify")
_ADDRESSINGS: Final = ("auto", "path", "virtual")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_SEGMENT = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9!_.*'()=@+,:-]+")
_REGION = re.compile(r"[A-Za-z0-9_-]{1,64}")


class S3Location(msgspec.Struct, frozen=True):
    """A prefix in a bucket, and the settings to reach its server.

    prefix: may be empty, and has no slash at its ends. endpoint: a URL, or None for AWS.
    addressing: whether the path or the host ("virtual") contains the bucket's name.

    verify: whether to verify the server's TLS certificate, or the absolute path of a file with the
    certificate authorities.
    """

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    verify: bool | str = True

    @property
    def root(self) -> str:
        """Return the beginning of every key of this store."""
        return f"{self.prefix}/" if self.prefix else ""

    def url(self, key: str = "") -> str:
        """Return the URL of the prefix, or of this key or key prefix, without settings."""
        return f"{_SCHEME}{self.bucket}/{key or self.prefix}".rstrip("/")

    def __str__(self) -> str:
        """Return the location that parse() accepts."""
        settings = {
            "endpoint": self.endpoint,
            "region": self.region,
            "addressing": None if self.addressing == "auto" else self.addressing,
            "verify": "false" if self.verify is False else self.verify,
        }
        given = {name: value for name, value in settings.items() if value and value is not True}
        query = urlencode(given, safe="/:", quote_via=quote)
        return f"{self.url()}?{query}" if query else self.url()


def parse(location: str) -> Path | S3Location:
    """Return the directory or prefix that this text names.

    Raises UsageError for any other text. The message does not repeat text that may be a secret.
    """
    if location.startswith(_SCHEME):
        return _parse_s3(location)
    if not location.startswith("/") or "\0" in location:
        raise UsageError(_no_location(location))
    return Path(location)


def _no_location(text: str) -> str:
    """Return why this text is not a location. If it is a URL, show only the scheme.

    The rest of a URL may contain a password.
    """
    scheme, url, _ = text.partition("://")
    if url:
        shown = f", not at {scheme}://" if scheme.isalnum() else ""
        return f"a store of checkpoints is in a folder or at s3://bucket/prefix{shown}"
    if "\0" in text:
        return "the path of a store of checkpoints has a NUL character"
    shown = "" if re.search(r"[:@]", text) else f" {text.partition('?')[0]!r}"
    return (
        f"the location{shown} is neither an absolute path nor s3://bucket/prefix: only commands, "
        "job files and forms accept a relative path"
    )


def _parse_s3(location: str) -> S3Location:
    name, _, query = location[len(_SCHEME) :].partition("?")
    bucket, _, prefix = name.partition("/")
    if "@" in bucket or not _BUCKET.fullmatch(bucket):
        raise UsageError(
            "the text after s3:// is not a valid name of a bucket; write s3://bucket/prefix, "
            "and give the credentials in the environment"
        )
    prefix = prefix.rstrip("/")
    if prefix and not all(_SEGMENT.fullmatch(segment) for segment in prefix.split("/")):
        raise UsageError(
            f"the prefix {prefix!r} of bucket {bucket!r} is invalid; use letters, digits and "
            "!_.*'()=@+,:- with single slashes between them"
        )
    settings = _settings(query)
    addressing = settings.get("addressing", "auto")
    if addressing not in _ADDRESSINGS:
        raise UsageError(f"addressing is one of {', '.join(_ADDRESSINGS)}, not {addressing!r}")
    region = settings.get("region")
    if region is not None and not _REGION.fullmatch(region):
        raise UsageError(f"{region!r} is not a valid name of a region")
    return S3Location(
        bucket=bucket,
        prefix=prefix,
        endpoint=_endpoint(settings.get("endpoint")),
        region=region,
        addressing=cast("Addressing", addressing),
        verify=_verify(settings.get("verify", "true")),
    )


def _settings(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in pairs]
    wrong = sorted(set(names).difference(_SETTINGS))
    if wrong or len(names) > len(set(names)):
        raise UsageError(
            f"a location may have {', '.join(_SETTINGS)} after the ?, each once, and must not "
            f"have a secret; this one has {', '.join(wrong or names)}"
        )
    return dict(pairs)


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number, or the address is not valid
        good = None
    if not good or re.search(r"[@?#\s]", text):
        raise UsageError(
            "an endpoint is https://host or https://host:port, without user, password or query"
        )
    return text.rstrip("/")


def _verify(text: str) -> bool | str:
    if text in ("true", "false"):
        return text == "true"
    if not text.startswith("/"):
        raise UsageError(
            f"verify is {text!r}; give true, false or the absolute path of a file with "
            "certificate authorities"
        )
    return text


def absolute(location: str, folder: Path | None = None) -> str:
    """Return a location from a user's text. A relative path is relative to `folder`.

    folder: None: the working directory. The function does not change a URL; parse() refuses a URL
    of another scheme.
    """
    if "://" in location:
        return location
    return str(Path(folder or "", Path(location).expanduser()).absolute())


def below(location: str, name: str) -> str:
    """Return the location of the store `name` below another location."""
    if not location.startswith(_SCHEME):
        return f"{location.rstrip('/')}/{name}"
    place, mark, settings = location.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{settings}"


def above(location: str) -> tuple[str, str]:
    """Return the location and the name from which below() made this location."""
    place, mark, settings = location.partition("?") if "://" in location else (location, "", "")
    where, _, name = place.rpartition("/")
    return f"{where}{mark}{settings}", name
