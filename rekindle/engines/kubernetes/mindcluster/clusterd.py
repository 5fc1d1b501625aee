"""Read and switch a job's data trace, and call the other services of ClusterD, over gRPC.

Without ClusterD's address, the ConfigMap of the job switches the trace. Only this module imports
grpcio. Messages and methods come from profiling.proto, fault.proto and recover.proto of
github.com/Ascend/mind-cluster (component/clusterd/pkg/interface/grpc, at be58626, bcf73fc). Their
fields are texts, numbers and messages, numbered from 1 in their order. So a class states a message
completely, and generated code is unnecessary.

ClusterD has one subscriber for a job and a service. A second one replaces the job's own TaskD, so
Rekindle subscribes only on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.engines.kubernetes.client.objects import collection, find, path_of
from rekindle.engines.kubernetes.labels import Names, Role, labels, selector
from rekindle.engines.kubernetes.manifests.ascend import TRACE_FOLDER
from rekindle.engines.kubernetes.manifests.coordinator import owned
from rekindle.engines.kubernetes.manifests.render import adapter
from rekindle.engines.kubernetes.manifests.settings import WorkloadKind
from rekindle.engines.kubernetes.mindcluster.reports import decode, name_of, text_of
from rekindle.errors import JobError, UsageError, extra_of
from rekindle.profiling.switch import FIELDS, Switch, read_switch, values

_PREFIX, _KEY = "data-trace-", "profilingSwitch"
ADDRESS = "clusterd-grpc-svc.mindx-dl.svc.cluster.local:8899"
ANSWER_S = 10.0
_TEXT, _NUMBER = 2, 0  # wire types: a length and that many bytes; a varint
_OK = (0, 200)
T = TypeVar("T", bound=msgspec.Struct)
MODIFY_TRACE = "/TrainingDataTrace/ModifyTrainingDataTraceSwitch"
GET_TRACE = "/TrainingDataTrace/GetTrainingDataTraceSwitch"
FOLLOW_TRACE = "/TrainingDataTrace/SubscribeDataTraceSwitch"
REGISTER_FAULTS = "/fault.Fault/Register"
GET_FAULTS = "/fault.Fault/GetFaultMsgSignal"
FOLLOW_FAULTS = "/fault.Fault/SubscribeFaultMsgSignal"
INIT_RECOVERY = "/Recover/Init"
REGISTER_RECOVERY = "/Recover/Register"
FOLLOW_RECOVERY = "/Recover/SubscribeProcessManageSignal"


class SwitchWords(msgspec.Struct, frozen=True):
    """The words on or off for each kind of record, in the order of Switch."""

    communication: str = ""
    step: str = ""
    save_checkpoint: str = ""
    forward: str = ""
    data_loader: str = ""

    @classmethod
    def of(cls, switch: Switch) -> SwitchWords:
        """Return the words for a switch."""
        return cls(*values(switch))

    @property
    def switch(self) -> Switch:
        """Return the switch."""
        return read_switch(dict(zip(FIELDS, msgspec.structs.astuple(self), strict=True)))


class DataTypeReq(msgspec.Struct, frozen=True):
    """The order to switch the trace of a job ("namespace/name")."""

    job: str
    switch: SwitchWords


class DataTypeRes(msgspec.Struct, frozen=True):
    """The answer to such an order."""

    message: str = ""
    code: int = 0


class DataStatusReq(msgspec.Struct, frozen=True):
    """The question for the switch of a job ("namespace/name")."""

    job: str


class DataStatusRes(msgspec.Struct, frozen=True):
    """The switch of a job."""

    message: str = ""
    switch: SwitchWords | None = None
    code: int = 0


class ClientInfo(msgspec.Struct, frozen=True):
    """A client of a job; job: the uid of its workload, which is MINDX_TASK_ID in its pods."""

    job: str
    role: str = "rekindle"


class Status(msgspec.Struct, frozen=True):
    """The answer of a service."""

    code: int = 0
    info: str = ""


class SwitchFault(msgspec.Struct, frozen=True):
    """A fault of a bus switch."""

    code: str = ""
    chip: str = ""
    port: str = ""
    time: str = ""


class DeviceFault(msgspec.Struct, frozen=True):
    """The faults of a device of a node."""

    device: str = ""
    type: str = ""
    codes: tuple[str, ...] = ()
    level: str = ""
    types: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    switches: tuple[SwitchFault, ...] = ()


class NodeFault(msgspec.Struct, frozen=True):
    """The faults of a node."""

    name: str = ""
    address: str = ""
    serial: str = ""
    level: str = ""
    devices: tuple[DeviceFault, ...] = ()


class FaultSignal(msgspec.Struct, frozen=True):
    """All faults of a job's nodes. type: fault, normal or keep-alive."""

    uuid: str = ""
    job: str = ""
    type: str = ""
    nodes: tuple[NodeFault, ...] = ()


class FaultResult(msgspec.Struct, frozen=True):
    """The answer to the question for faults."""

    code: int = 0
    info: str = ""
    signal: FaultSignal = FaultSignal()


class FaultRank(msgspec.Struct, frozen=True):
    """A failed rank. type: 0 memory, 1 another fault, 2 network."""

    rank: str = ""
    type: str = ""


class ManageSignal(msgspec.Struct, frozen=True):
    """An order of ClusterD to the starter of a job's processes."""

    uuid: str = ""
    job: str = ""
    type: str = ""
    actions: tuple[str, ...] = ()
    ranks: tuple[FaultRank, ...] = ()
    strategy: str = ""
    limit: int = 0


class Clusterd:
    """A connection to ClusterD. Each method raises JobError: it does not answer, or refuses."""

    def __init__(self, channel: Any, address: str) -> None:
        self._channel, self._address = channel, address

    def ask(self, method: str, request: msgspec.Struct, answer: type[T]) -> T:
        """Call a method with one answer, and check the code in it."""
        with self._errors(method):
            content = self._channel.unary_unary(method)(encoded(request), timeout=ANSWER_S)
        found = decoded(content, answer)
        code = getattr(found, "code", 0)
        if code not in _OK:
            text = getattr(found, "message", "") or getattr(found, "info", "")
            raise JobError(f"ClusterD at {self._address} refuses with code {code}: {text}")
        return found

    def follow(self, method: str, request: msgspec.Struct, answer: type[T]) -> Iterator[T]:
        """Yield the answers of a stream until ClusterD ends it."""
        with self._errors(method):
            for content in self._channel.unary_stream(method)(encoded(request)):
                yield decoded(content, answer)

    @contextmanager
    def _errors(self, method: str) -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise JobError(f"ClusterD at {self._address} fails in {method}: {why}") from error


@contextmanager
def connected(address: str) -> Iterator[Clusterd]:
    """Yield a connection. address: "host:port". Raises UsageError: grpcio is not installed."""
    try:
        import grpc
    except ModuleNotFoundError as error:
        raise extra_of(error) from error
    with grpc.insecure_channel(address) as channel:
        yield Clusterd(channel, address)


# ---- what a job asks


def modify_trace(address: str, job: str, switch: Switch) -> None:
    """Switch the trace of a job ("namespace/name"). address: "host:port".

    ClusterD writes the job's ConfigMap, and notifies the TaskD that listens. Raises UsageError:
    grpcio is not installed. Raises JobError: ClusterD does not answer, or refuses.
    """
    with connected(address) as clusterd:
        clusterd.ask(MODIFY_TRACE, DataTypeReq(job, SwitchWords.of(switch)), DataTypeRes)


def get_trace(address: str, job: str) -> Switch:
    """Return the switch of a job ("namespace/name"). Raises as `modify_trace` does."""
    with connected(address) as clusterd:
        return _switch_in(clusterd.ask(GET_TRACE, DataStatusReq(job), DataStatusRes))


def follow_trace(address: str, uid: str) -> Iterator[Switch]:
    """Yield the switch of a job at each change. uid: of its workload. Raises as `modify_trace`."""
    with connected(address) as clusterd:
        for each in clusterd.follow(FOLLOW_TRACE, ClientInfo(uid), DataStatusRes):
            yield _switch_in(each)


def faults_of(address: str, uid: str, *, follow: bool) -> Iterator[FaultSignal]:
    """Yield the present faults of a job's nodes, and with `follow` each change of them.

    uid: of its workload. Raises as `modify_trace` does.
    """
    client = ClientInfo(uid)
    with connected(address) as clusterd:
        clusterd.ask(REGISTER_FAULTS, client, Status)
        if follow:
            yield from clusterd.follow(FOLLOW_FAULTS, client, FaultSignal)
        else:
            yield clusterd.ask(GET_FAULTS, client, FaultResult).signal


def orders_to(address: str, uid: str) -> Iterator[ManageSignal]:
    """Yield ClusterD's orders to the starter of a job's processes. uid: of its workload.

    Raises as `modify_trace` does.
    """
    client = ClientInfo(uid)
    with connected(address) as clusterd:
        clusterd.ask(INIT_RECOVERY, client, Status)
        clusterd.ask(REGISTER_RECOVERY, client, Status)
        yield from clusterd.follow(FOLLOW_RECOVERY, client, ManageSignal)


def _switch_in(answer: DataStatusRes) -> Switch:
    return answer.switch.switch if answer.switch else Switch()


def uid_of(api: Api, namespace: str, job_id: str) -> str:
    """Return the uid of a job's workload, by which ClusterD knows the job.

    Raises UsageError: there is no job. Raises ApiError.
    """
    job = Names.of(job_id)
    root = find(api, f"{collection('v1', 'configmaps', namespace)}/{job.root}")
    gvk = adapter(WorkloadKind(root["data"]["kind"])).gvk if root else None
    path = f"{collection(gvk.api_version, gvk.plural, namespace)}/{job.workload}" if gvk else ""
    found = find(api, path) if path else None
    if found is None:
        raise UsageError(f"there is no job {job_id!r} in namespace {namespace}")
    return str(found["metadata"]["uid"])


# ---- the data trace of a job


def data_trace(job_id: str, namespace: str, switch: Switch) -> Object:
    """Return the ConfigMap that switches TaskD. Pure."""
    encoded = msgspec.json.encode(dict(zip(FIELDS, values(switch), strict=True))).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{_PREFIX}{Names.of(job_id).workload}",
            "namespace": namespace,
            "labels": {"reset": "true", **labels(job_id)},
        },
        "data": {_KEY: encoded},
    }


def read_trace(configmap: Object) -> Switch:
    """Read the switch in a ConfigMap of any writer. Pure. Raises DamagedError."""
    what = f"{name_of(configmap)}: {_KEY}"
    text = text_of(configmap, _KEY)
    if text is None:
        raise DamagedError(f"{what} is missing")
    encoded = decode(text, dict[str, str], what)
    return read_switch(encoded)


def traced(api: Api, namespace: str, job_id: str) -> Switch:
    """Return the switch that is on now. Raises ApiError, DamagedError."""
    found = find(api, path_of(data_trace(job_id, namespace, Switch())))
    return read_trace(found) if found else Switch()


def switch_trace(api: Api, namespace: str, job_id: str, switch: Switch) -> None:
    """Write the ConfigMap; the cluster deletes it with the job.

    Raises UsageError: the job does not exist, or its pods do not mount the folder of the switch.
    Raises ApiError.
    """
    job, pods = Names.of(job_id), collection("v1", "pods", namespace)
    root = find(api, f"{collection('v1', 'configmaps', namespace)}/{job.root}")
    if root is None:
        raise UsageError(f"there is no job {job_id!r} in namespace {namespace}")
    workers = api.get(pods, labelSelector=selector(job_id, Role.WORKER)).get("items") or ()
    if workers and not any(map(_looks, workers)):
        raise UsageError(
            f"the pods of job {job_id} do not mount {TRACE_FOLDER}, so they cannot read the "
            "switch; describe them with ascend: {data_trace: true}"
        )
    wanted = owned(data_trace(job_id, namespace, switch), root["metadata"]["uid"])
    api.apply(path_of(wanted), wanted)


def _looks(pod: Object) -> bool:
    containers = pod["spec"]["containers"]
    mounts = [mount for one in containers for mount in one.get("volumeMounts") or ()]
    return any(mount["mountPath"].rstrip("/") == TRACE_FOLDER for mount in mounts)


# ---- messages


def encoded(message: msgspec.Struct) -> bytes:
    """Encode a message as protobuf; fields with their default value are left out."""
    written = bytearray()
    for number, name in enumerate(message.__struct_fields__, 1):
        value = getattr(message, name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is None:
                continue
            if isinstance(each, int):
                written += _varint(number << 3 | _NUMBER) + _varint(each) if each else b""
                continue
            content = encoded(each) if isinstance(each, msgspec.Struct) else each.encode()
            if content or isinstance(value, tuple):
                written += _varint(number << 3 | _TEXT) + _varint(len(content)) + content
    return bytes(written)


def decoded(content: bytes, kind: type[T]) -> T:
    """Decode a message; unknown fields are skipped. Raises JobError: it has another format."""
    try:
        return _decode(content, kind)
    except (IndexError, ValueError, msgspec.ValidationError) as error:
        raise JobError(f"ClusterD's answer is not a {kind.__name__}: {content[:80]!r}") from error


def _decode(content: bytes, kind: type[T]) -> T:
    hints, names = get_type_hints(kind), kind.__struct_fields__
    values: dict[str, Any] = {}
    for number, found in _fields(content):
        if number > len(names):
            continue
        name = names[number - 1]
        many = get_origin(hints[name]) is tuple
        value = _value(found, _inner(hints[name]))
        values[name] = (*values.get(name, ()), value) if many else value
    return kind(**values)


def _inner(hint: Any) -> Any:
    """Return the type of one value: of a list, or of a message that may be absent."""
    inside = [each for each in get_args(hint) if each not in (Ellipsis, type(None))]
    return inside[0] if inside else hint


def _value(found: bytes | int, hint: Any) -> Any:
    if hint is int or isinstance(found, int):
        if hint is not int or not isinstance(found, int):
            raise ValueError(f"{found!r} is not of the type {hint}")
        return found
    return found.decode() if hint is str else _decode(found, hint)


def _varint(number: int) -> bytes:
    written = bytearray()
    number &= 2**64 - 1  # a negative number has ten bytes
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield each field with its number. Raises IndexError, ValueError: incomplete or other data."""
    at = 0
    while at < len(content):
        key, at = _read_varint(content, at)
        value, at = _read_varint(content, at)
        if key & 7 == _NUMBER:
            yield key >> 3, value
        elif key & 7 == _TEXT:
            if at + value > len(content):
                raise IndexError(f"{value} bytes after {at} of {len(content)}")
            yield key >> 3, content[at : at + value]
            at += value
        else:
            raise ValueError(f"wire type {key & 7}")


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        number |= (content[at] & 0x7F) << shift
        at += 1
        if not content[at - 1] & 0x80:
            return number, at
    raise ValueError("a varint of more than 10 bytes")
