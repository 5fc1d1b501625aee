"""Read and switch a job's data trace through ClusterD, over gRPC or a ConfigMap.

Only this module imports grpcio. Messages and method come from profiling.proto and TrainingDataTrace
in github.com/Ascend/mind-cluster (component/clusterd/pkg/interface/grpc, at be58626). They consist
of strings and one number, so generated code is unnecessary. Rekindle does not subscribe to
ClusterD's streams: a subscriber replaces the job's own TaskD.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rekindle.engines.kubernetes.client.api import Api, Object
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.engines.kubernetes.client.objects import collection, find, path_of
from rekindle.engines.kubernetes.labels import Names, Role, labels, selector
from rekindle.engines.kubernetes.manifests.ascend import TRACE_FOLDER
from rekindle.engines.kubernetes.manifests.coordinator import owned
from rekindle.engines.kubernetes.mindcluster.reports import decode, name_of, text_of
from rekindle.errors import JobError, UsageError, extra_of
from rekindle.profiling.switch import FIELDS, Switch, read_switch, values

_PREFIX, _KEY = "data-trace-", "profilingSwitch"
ADDRESS = "clusterd-grpc-svc.mindx-dl.svc.cluster.local:8899"
METHOD = "/TrainingDataTrace/ModifyTrainingDataTraceSwitch"
ANSWER_S = 10.0
_DONE = 200
_TEXT, _NUMBER = 2, 0  # wire types: a length and that many bytes; a varint


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


def modify_trace(address: str, job: str, switch: Switch) -> None:
    """Switch the trace of a job ("namespace/name"). address: "host:port".

    ClusterD writes the job's ConfigMap, and notifies the TaskD that listens. Raises UsageError:
    grpcio is not installed. Raises JobError: ClusterD does not answer, or refuses.
    """
    try:
        import grpc
    except ModuleNotFoundError as error:
        raise extra_of(error) from error
    with grpc.insecure_channel(address) as channel:
        try:
            answer = channel.unary_unary(METHOD)(request(job, switch), timeout=ANSWER_S)
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise JobError(f"ClusterD at {address} did not switch the trace: {why}") from error
    message, code = response(answer)
    if code != _DONE:
        raise JobError(f"ClusterD at {address} refuses with code {code}: {message}")


def request(job: str, switch: Switch) -> bytes:
    """Encode a DataTypeReq: field 1 is jobNsName, field 2 profilingSwitch with fields 1 to 5."""
    fields = [_text(number, encoded) for number, encoded in enumerate(values(switch), 1)]
    return _text(1, job) + _field(2, b"".join(fields))


def response(content: bytes) -> tuple[str, int]:
    """Decode a DataTypeRes: message is field 1, code is field 2.

    Raises JobError: the content has another format.
    """
    message, code = "", 0
    try:
        for number, found in _fields(content):
            if number == 1 and isinstance(found, bytes):
                message = found.decode()
            elif number == 2 and isinstance(found, int):
                code = found
    except (IndexError, ValueError) as error:
        raise JobError(f"ClusterD's answer is not a DataTypeRes: {content[:80]!r}") from error
    return message, code


def _text(number: int, encoded: str) -> bytes:
    return _field(number, encoded.encode())


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _TEXT) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    written = bytearray()
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
