"""The description of a job, and the job directory in which its processes meet."""

from __future__ import annotations

import contextlib
import enum
import hmac
import importlib.util
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Literal

import msgspec

from rekindle import names
from rekindle.checkpoints.location import parse
from rekindle.checkpoints.open_store import check_location
from rekindle.checkpoints.retention import Retention
from rekindle.errors import UsageError
from rekindle.job.ascend import check_environment
from rekindle.recovery.node_check.evidence import NodeCheckLimits
from rekindle.recovery.policy.interval import AUTO
from rekindle.recovery.policy.policy import OUTER, Policy, Strategy

_NO_GRACE = "-1"
_SECONDS = re.compile(r"[1-9][0-9]{0,8}")
_JOB_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class EntryKind(str, enum.Enum):
    """How an agent starts the ranks' program."""

    SCRIPT = "script"  # a Python file
    MODULE = "module"  # python -m NAME
    PROGRAM = "program"  # any executable (torchrun --no-python)


class Framework(str, enum.Enum):
    """The training framework. The fork server imports it, and it decides how ranks meet."""

    TORCH = "torch"
    MINDSPORE = "mindspore"


class KeepsOff(str, enum.Enum):
    """How the engine keeps new agents of a job off isolated hosts."""

    NEVER = "never"  # the engine does not control their hosts
    ONE_HOST = "one-host"  # the job has only this machine, which it cannot leave
    RESTARTS = "anew"  # when it reschedules the whole job
    AT_ONCE = "at-once"


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run, as coordinator and agents receive it.

    nodes, processes_per_node: the world size is nodes x processes_per_node.
    min_nodes: the least number of nodes that lets the job continue; 0: all of them.
    spares: agents in reserve, each ready to replace a lost node.

    snapshot_every, checkpoint_every: steps between two of them; 0: never. checkpoint_every "auto":
    rekindle.recovery.policy.interval chooses.
    keep: the checkpoints that stay when a newer one is written; by default all.
    checkpoint_store: location of the checkpoints (`rekindle.checkpoints.location`): an absolute
    path, shared by all nodes or private to each, or a URL.

    master_port: port of the ranks' store; 0: any free one.
    allow_injection: whether `rekindle inject` may inject faults.
    network_check: the coordinator checks nodes before it admits their agents, and refuses faulty
    nodes; exclude_straggler: also slow ones. node_check: the limits for both.
    fault_tables: a file of the user's own entries (docs/recover/faults.md); absolute.

    engine: the outer strategies that the engine of the job can carry out.
    keeps_off: how the engine keeps agents off isolated hosts.

    redirects, tee: as -r and -t of torchrun: 0 none, 1 stdout, 2 stderr, 3 both
        (docs/operate/running.md).
    """

    job_id: str
    entry: EntryKind
    target: str
    arguments: tuple[str, ...] = ()
    framework: Framework = Framework.TORCH
    nodes: int = 1
    min_nodes: int = 0
    processes_per_node: int = 1
    spares: int = 0
    environment: dict[str, str] = {}
    working_directory: str
    directory: str
    log_directory: str
    checkpoint_store: str
    snapshot_every: int = 10
    checkpoint_every: int | Literal["auto"] = 0
    keep: Retention = Retention()
    master_addr: str = ""
    master_port: int = 0
    role: str = "default"
    redirects: int = 0
    tee: int = 0
    allow_injection: bool = False
    policy: Policy = Policy()
    network_check: bool = False
    exclude_straggler: bool = False
    node_check: NodeCheckLimits = NodeCheckLimits()
    fault_tables: str = ""
    engine: tuple[Strategy, ...] = OUTER
    keeps_off: KeepsOff = KeepsOff.NEVER

    @property
    def world_size(self) -> int:
        """The number of ranks in the full world."""
        return self.nodes * self.processes_per_node

    @property
    def can_join(self) -> bool:
        """Whether a new process can join the collectives of live processes.

        MindSpore's collectives cannot admit one, and a process cannot form them a second time.
        """
        return self.framework is not Framework.MINDSPORE

    @property
    def least_nodes(self) -> int:
        """The number of nodes of the smallest world."""
        return self.min_nodes or self.nodes

    @property
    def failover_grace_s(self) -> float | None:
        """Seconds to wait for the removal of a pod whose grace has passed; None: the default.

        ModelArts then continues, and unmounts the volumes of the old container later. The engine
        removes the pod by force, and the host cleans up. The time for the end of the ranks and for
        the final checkpoint is separate.
        """
        text = self.environment.get(names.ENV_FAILOVER_GRACE, _NO_GRACE)
        return None if text == _NO_GRACE else float(text)


def on_this_machine(spec: JobSpec) -> JobSpec:
    """Return the description of a job whose nodes all run on this machine.

    One node has the machine itself as its host. Several nodes have simulated hosts, which the
    engine chooses.
    """
    alone = spec.nodes + spec.spares == 1
    return msgspec.structs.replace(spec, keeps_off=KeepsOff.ONE_HOST) if alone else spec


def check(spec: JobSpec) -> JobSpec:
    """Return `spec` if a job can use it on this machine.

    Raises UsageError: a field is invalid; the text names the field and a valid value.
    """
    check_elsewhere(spec)
    if not Path(spec.working_directory).is_dir():
        raise UsageError(
            f"working directory {spec.working_directory} does not exist; make it, or name another"
        )
    check_location(spec.checkpoint_store)
    check_environment(os.environ | spec.environment, spec.policy)
    framework = spec.framework.value
    of_python = spec.entry is not EntryKind.PROGRAM
    if of_python and importlib.util.find_spec(framework) is None:
        other = "mindspore" if spec.framework is Framework.TORCH else "torch"
        raise UsageError(
            f"framework is {framework}, but {sys.executable} does not have it. Run the job in a "
            f"Python environment with rekindle[{framework}] (mindspore has a separate "
            f"environment), or give --framework {other}, or --no-python for a script that is any "
            "program"
        )
    if spec.entry is EntryKind.SCRIPT:
        script = Path(spec.working_directory, spec.target)
        if not script.is_file():
            raise UsageError(
                f"training script {script} does not exist; correct its name, which is relative to "
                "the working directory"
            )
    return spec


def check_elsewhere(spec: JobSpec) -> JobSpec:
    """Return `spec` if a job can use it on other machines, where its paths exist.

    Raises UsageError: as check() does.
    """
    check_job_id(spec.job_id)
    _check_world(spec)
    for name in ("snapshot_every", "checkpoint_every"):
        every = getattr(spec, name)
        if every != AUTO and every < 0:
            raise UsageError(f"{name} is {every}; give steps, or 0 for never")
    grace = spec.environment.get(names.ENV_FAILOVER_GRACE, _NO_GRACE)
    if grace != _NO_GRACE and not _SECONDS.fullmatch(grace):
        raise UsageError(
            f"{names.ENV_FAILOVER_GRACE} is {grace!r}; give a whole number of seconds, at least "
            f"1, or {_NO_GRACE} for none"
        )
    if not 0 <= spec.master_port < 65536:
        raise UsageError(
            f"master port {spec.master_port} is not a valid port; use 0 for any free port"
        )
    parse(spec.checkpoint_store)
    return spec


def check_job_id(job_id: str) -> None:
    """Check a job id. Raises UsageError: no job can have this id."""
    if not _JOB_ID.fullmatch(job_id):
        raise UsageError(
            f"job id {job_id!r} is invalid; use 1 to 63 of a-z 0-9 . _ - and begin with a letter "
            "or digit"
        )


def _check_world(spec: JobSpec) -> None:
    for name in ("nodes", "processes_per_node"):
        if getattr(spec, name) < 1:
            raise UsageError(f"{name} is {getattr(spec, name)}; give at least 1")
    if not 0 <= spec.min_nodes <= spec.nodes:
        raise UsageError(
            f"min_nodes is {spec.min_nodes}; give 1 to {spec.nodes} (nodes), or 0 for all of them"
        )
    if spec.least_nodes < spec.nodes and not spec.can_join:
        raise UsageError(
            f"min_nodes is {spec.min_nodes}, but a world of {spec.framework.value} cannot change "
            f"its size; give {spec.nodes}, or 0"
        )
    if spec.framework is Framework.MINDSPORE and spec.entry is EntryKind.PROGRAM:
        raise UsageError(
            "--no-python does not work with mindspore, because MindSpore's scheduler needs "
            "Python; give the script or its module"
        )
    if spec.spares < 0:
        raise UsageError(f"spares is {spec.spares}; give a number of nodes, or 0 for none")


def home() -> Path:
    """Return the folder of all job directories of this user."""
    return Path(os.environ.get(names.ENV_HOME) or Path.home() / ".rekindle").absolute()


def job_directory(job_id: str, at: Path | None = None) -> Path:
    """Return the directory of the job with this id. at: the folder to use instead of home()."""
    return (at or home()) / "jobs" / job_id


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address, process and attempt of the job's coordinator. wire: its WIRE_VERSION."""

    host: str
    port: int
    pid: int
    attempt: int
    wire: int = names.WIRE_VERSION


class JobDirectory:
    """The files of one job on this machine.

    pods: describes the pods of a job in a cluster, for the engine. cluster: the address of the
    cluster, while the cluster has the job. journal_file: the job's journal, one JSON event a line
    (rekindle.recovery.journal.journal).
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.pods = self.path / names.PODS_FILE
        self.cluster = self.path / names.CLUSTER_FILE
        self.journal_file = self.path / names.JOURNAL_FILE

    def make(self) -> None:
        """Make the folder. Raises UsageError: the filesystem refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"Rekindle cannot create the job directory {self.path}: {error}"
            ) from error

    def create(self, spec: JobSpec, *, logs: bool = True, secret: str = "") -> None:
        """Make the directory, the secrets and the description.

        secret: the job's secret. Without it the existing one stays, or a random one is made. logs:
        whether the ranks write their output on this machine. If so, make its folder as well.
        Raises UsageError: the directory cannot be made.
        """
        self.make()
        if logs:
            Path(spec.log_directory).mkdir(parents=True, exist_ok=True)
        _write_secret(self.path / names.SECRET_FILE, secret)
        _write_secret(self.path / names.MONITOR_FILE)
        replace_file(self.path / names.SPEC_FILE, msgspec.json.encode(spec))

    def spec(self) -> JobSpec:
        """Read the job's description. Raises UsageError: it does not exist, or is unreadable."""
        try:
            return msgspec.json.decode((self.path / names.SPEC_FILE).read_bytes(), type=JobSpec)
        except FileNotFoundError as error:
            raise UsageError(f"there is no job in {self.path}") from error
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{self.path / names.SPEC_FILE} does not describe a job: {error}"
            ) from error

    def devices(self) -> list[str]:
        """Read the names of the devices that the job must hold; none if there is no file."""
        file = self.path / names.DEVICES_FILE
        return file.read_text().splitlines() if file.exists() else []

    def secret(self) -> str:
        """Read the job's secret. Raises UsageError: it does not exist, or is empty."""
        try:
            secret = (self.path / names.SECRET_FILE).read_text().strip()
        except FileNotFoundError as error:
            raise UsageError(f"there is no job secret in {self.path}") from error
        if not secret:
            raise UsageError(
                f"the job secret in {self.path} is empty; remove the file, and Rekindle writes a "
                "new one"
            )
        return secret

    def monitor_token(self) -> str:
        """Read the token of monitors on the coordinator's machine; empty: there is none."""
        try:
            return (self.path / names.MONITOR_FILE).read_text().strip()
        except FileNotFoundError:
            return ""

    def endpoint(self) -> Endpoint | None:
        """Read where the coordinator listens (or last listened); None: before the first one."""
        try:
            return msgspec.json.decode(
                (self.path / names.ENDPOINT_FILE).read_bytes(), type=Endpoint
            )
        except FileNotFoundError:
            return None

    def announce(self, endpoint: Endpoint) -> None:
        """Write where the coordinator listens."""
        replace_file(self.path / names.ENDPOINT_FILE, msgspec.json.encode(endpoint))


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    temporary.replace(path)


def _write_secret(path: Path, secret: str = "") -> None:
    """Write a secret that only this user can read.

    secret: empty: a random one, unless the file has one that keeps others out.
    """
    with contextlib.suppress(FileNotFoundError):
        if not secret and path.read_text().strip() == names.NO_SECRET:
            secret = secrets.token_hex(32)
    if secret:
        replace_file(path, secret.encode())
        return
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32))


def bearer(secret: str) -> str:
    """Return the Authorization header that proves knowledge of the job's secret."""
    return f"Bearer {secret}"


def is_authorized(header: str | None, secret: str) -> bool:
    """Check an Authorization header in constant time."""
    return hmac.compare_digest((header or "").encode(), bearer(secret).encode())
