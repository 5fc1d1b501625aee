"""S3 servers: rclone, which stores files in a directory, and moto, which supports conditions."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from waiting import join, status_of, wait_until

ACCESS_KEY = "marked-access-key"
SECRET_KEY = "marked-secret-key"
ENVIRONMENT = {
    "REKINDLE_STORE_ACCESS_KEY_ID": ACCESS_KEY,
    "REKINDLE_STORE_SECRET_ACCESS_KEY": SECRET_KEY,
}
BUCKET = "checkpoints"

_BIN = Path(sys.executable).parent
_prefixes = (f"jobs/{number}" for number in itertools.count())


class Server(msgspec.Struct, frozen=True):
    """A running server with an empty bucket."""

    port: int
    scheme: str = "http"

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def location(self, prefix: str = "", *, port: int | None = None) -> str:
        """Return the location of a new store.

        `port`: the port of a proxy in front of the server.
        """
        prefix = prefix or next(_prefixes)
        endpoint = f"{self.scheme}://127.0.0.1:{port or self.port}"
        return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}&addressing=path"

    def client(self) -> Any:
        """Return a boto3 client, with which tests inspect and damage the bucket."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


@contextlib.contextmanager
def rclone(root: Path, port: int = 0, *more: str) -> Iterator[Server]:
    """Run `rclone serve s3` on a directory."""
    (root / BUCKET).mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    scheme = "https" if "--cert" in more else "http"
    keys = f"{ACCESS_KEY},{SECRET_KEY}"
    command = [_BIN / "rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", *more]
    command += ["--auth-key", keys, "--config", "", root]
    with _running(command, port, root.with_suffix(".log")):
        yield Server(port, scheme)


@contextlib.contextmanager
def moto(log: Path) -> Iterator[Server]:
    """Run the server of moto."""
    port = free_port()
    with _running([_BIN / "moto_server", "-H", "127.0.0.1", "-p", str(port)], port, log):
        server = Server(port)
        with contextlib.closing(server.client()) as client:
            client.create_bucket(Bucket=BUCKET)
        yield server


@contextlib.contextmanager
def later(root: Path, port: int, seconds: float) -> Iterator[None]:
    """Start rclone on a directory after a number of seconds."""
    done = threading.Event()

    def serve() -> None:
        if not done.wait(seconds):
            with rclone(root, port):
                done.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        done.set()
        join(thread)


def certificate(folder: Path, host: str = "127.0.0.1") -> tuple[Path, Path]:
    """Write a self-signed certificate of an address or host name, and its key. Return the paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.timezone.utc)
    address: x509.GeneralName = x509.DNSName(host)
    if host[0].isdigit():
        address = x509.IPAddress(ipaddress.ip_address(host))
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "cert.pem").write_bytes(signed.public_bytes(pem))
    (folder / "key.pem").write_bytes(private)
    return folder / "cert.pem", folder / "key.pem"


@contextlib.contextmanager
def _running(command: list[Any], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
        try:
            _await(port, process, log)
            yield
        finally:
            process.terminate()
            status_of(process)


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        assert process.poll() is None, log.read_text()
        return False

    wait_until(listens, f"a server on port {port}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
