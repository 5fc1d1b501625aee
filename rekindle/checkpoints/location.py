"""A location: the one text that says where a store of checkpoints is. It holds no secret.

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
    """A prefix in a bucket, and how its server is reached.

    prefix: without slashes at its ends, may be empty. endpoint: a URL, or None for AWS.
    addressing: where the bucket is named, in the path or in the host ("virtual"). verify: whether
    the server's TLS certificate is, or the absolute path of the authorities to do it with.
    """

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    verify: bool | str = True

    @property
    def root(self) -> str:
        """What every key of this store begins with."""
        return f"{self.prefix}/" if self.prefix else ""

    def url(self, key: str = "") -> str:
        """The prefix, or this key (or what keys begin with), as people and tools name it."""
        return f"{_SCHEME}{self.bucket}/{key or self.prefix}".rstrip("/")

    def __str__(self) -> str:
        """The location that parse() takes."""
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
    """The directory or prefix that this text names.

    Raises UsageError, which repeats nothing that may be a secret, for any other text.
    """
    if location.startswith(_SCHEME):
        return _parse_s3(location)
    if not location.startswith("/") or "\0" in location:
        raise UsageError(_no_location(location))
    return Path(location)


def _no_location(text: str) -> str:
    """Why no store can be there. A URL may contain a password: its scheme alone is shown."""
    scheme, url, _ = text.partition("://")
    if url:
        shown = f", not at {scheme}://" if scheme.isalnum() else ""
        return f"a store of checkpoints is in a folder or at s3://bucket/prefix{shown}"
    if "\0" in text:
        return "the path of a store of checkpoints has a NUL character"
    shown = "" if re.search(r"[:@]", text) else f" {text.partition('?')[0]!r}"
    return (
        f"the location{shown} is neither an absolute path nor s3://bucket/prefix: a path that is "
        "relative to a folder is accepted by commands, job files and forms alone"
    )


def _parse_s3(location: str) -> S3Location:
    name, _, query = location[len(_SCHEME) :].partition("?")
    bucket, _, prefix = name.partition("/")
    if "@" in bucket or not _BUCKET.fullmatch(bucket):
        raise UsageError(
            "no bucket can have the name after s3://; write s3://bucket/prefix, "
            "and give the credentials in the environment"
        )
    prefix = prefix.rstrip("/")
    if prefix and not all(_SEGMENT.fullmatch(segment) for segment in prefix.split("/")):
        raise UsageError(
            f"the prefix {prefix!r} of bucket {bucket!r} cannot be used: "
            "take letters, digits and !_.*'()=@+,:- in it, with single slashes between"
        )
    settings = _settings(query)
    addressing = settings.get("addressing", "auto")
    if addressing not in _ADDRESSINGS:
        raise UsageError(f"addressing is one of {', '.join(_ADDRESSINGS)}, not {addressing!r}")
    region = settings.get("region")
    if region is not None and not _REGION.fullmatch(region):
        raise UsageError(f"no region can have the name {region!r}")
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
            f"after the ? of a location come {', '.join(_SETTINGS)}, each once, and no secret; "
            f"it has {', '.join(wrong or names)}"
        )
    return dict(pairs)


def _endpoint(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, an address that is none
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
            f"verify is true, false or the absolute path of a file of authorities, not {text!r}"
        )
    return text


def absolute(location: str, folder: Path | None = None) -> str:
    """A location from what a person wrote: a path is meant as seen from `folder`.

    folder: None: the working directory. parse() refuses a URL of another scheme.
    """
    if "://" in location:
        return location
    return str(Path(folder or "", Path(location).expanduser()).absolute())


def below(location: str, name: str) -> str:
    """The location of the store of this name below another."""
    if not location.startswith(_SCHEME):
        return f"{location.rstrip('/')}/{name}"
    place, mark, settings = location.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{settings}"


def above(location: str) -> tuple[str, str]:
    """The location and the name that below() made this of."""
    place, mark, settings = location.partition("?") if "://" in location else (location, "", "")
    where, _, name = place.rpartition("/")
    return f"{where}{mark}{settings}", name
