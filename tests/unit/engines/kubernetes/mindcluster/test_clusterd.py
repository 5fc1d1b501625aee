"""The data trace of a job: the ConfigMap that switches it, and the gRPC call to ClusterD."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster.launch import Simulated, start
from mindcluster import rank
from mindcluster import reset_config as written_by_clusterd
from rendered import pods, spec

from rekindle.cli import main as cli
from rekindle.engines.kubernetes.manifests import ascend
from rekindle.errors import JobError, UsageError

pytest.importorskip("kubernetes.client")
from rekindle.engines.kubernetes.client.api import load
from rekindle.engines.kubernetes.client.api_errors import DamagedError
from rekindle.engines.kubernetes.mindcluster.clusterd import (
    ClientInfo,
    DataStatusReq,
    DataStatusRes,
    DataTypeReq,
    DataTypeRes,
    DeviceFault,
    FaultRank,
    FaultResult,
    FaultSignal,
    ManageSignal,
    NodeFault,
    Status,
    SwitchFault,
    SwitchWords,
    data_trace,
    decoded,
    encoded,
    faults_of,
    follow_trace,
    get_trace,
    modify_trace,
    orders_to,
    read_trace,
)
from rekindle.engines.kubernetes.mindcluster.resets import read_reset
from rekindle.engines.kubernetes.placement.placement import Placement
from rekindle.engines.kubernetes.placement.quarantine import Hosts
from rekindle.job.spec import JobDirectory
from rekindle.profiling.switch import FIELDS, Switch, switch_of

MAPS = "/api/v1/namespaces/default/configmaps"
STEPS = Switch(step=True, save_checkpoint=True, forward=True, data_loader=True)
ALL = msgspec.structs.replace(STEPS, communication=True)


@pytest.mark.parametrize(
    ("words", "switch"),
    [
        ([], Switch()),
        (["step"], STEPS),
        (["data-loader", "forward"], STEPS),
        (["communication"], ALL),
        (["communication", "step"], ALL),
    ],
)
def test_what_goes_together(words: list[str], switch: Switch) -> None:
    """All kinds except communication go together, and communication enables the others too.

    MindCluster does the same.
    """
    assert switch_of(words) == switch
    assert set(words) <= set(switch.words)
    assert read_trace(data_trace("demo", "default", switch)) == switch


def test_words() -> None:
    """switch_of() refuses an unknown word, and lists the valid words."""
    with pytest.raises(UsageError, match=r"fp is not a kind of record; choose from communication"):
        switch_of(["fp", "step"])


def test_the_form_that_mindcluster_expects() -> None:
    """Name, label, key and values of the ConfigMap follow MindCluster's guide to profiling."""
    thing = data_trace("demo", "default", STEPS)
    assert thing["metadata"]["name"] == "data-trace-demo"
    assert thing["metadata"]["labels"]["reset"] == "true"
    assert json.loads(thing["data"]["profilingSwitch"]) == {
        "CommunicationOperator": "off",
        "Step": "on",
        "SaveCheckpoint": "on",
        "FP": "on",
        "DataLoader": "on",
    }


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"Step":1}', "null"])
def test_a_switch_that_is_damaged(text: Any) -> None:
    """The error for a damaged switch names its ConfigMap."""
    thing = data_trace("demo", "default", STEPS) | {"data": {"profilingSwitch": text}}
    with pytest.raises(DamagedError, match="data-trace-demo: profilingSwitch"):
        read_trace(thing)


# ---- ClusterD's message


def fields(content: bytes) -> dict[int, bytes | int]:
    """Decode a protobuf message of short fields, according to the specification."""
    found: dict[int, bytes | int] = {}
    while content:
        number, kind, size = content[0] >> 3, content[0] & 7, content[1]
        assert size < 128
        found[number] = content[2 : 2 + size] if kind == 2 else size
        content = content[2 + size :] if kind == 2 else content[2:]
    return found


def request(job: str, switch: Switch) -> bytes:
    return encoded(DataTypeReq(job, SwitchWords.of(switch)))


def response(content: bytes) -> tuple[str, int]:
    found = decoded(content, DataTypeRes)
    return found.message, found.code


def test_the_message() -> None:
    """The field numbers follow profiling.proto: jobNsName 1, profilingSwitch 2, its words 1-5."""
    found = fields(request("default/demo", STEPS))
    assert set(found) == {1, 2}
    assert found[1] == b"default/demo"
    assert isinstance(found[2], bytes)
    assert fields(found[2]) == {1: b"off", 2: b"on", 3: b"on", 4: b"on", 5: b"on"}
    assert FIELDS == ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")
    long = "default/" + "x" * 300
    assert long.encode() in request(long, STEPS)


def test_the_answer() -> None:
    """decoded() returns the message and the code (two bytes for 200), and skips unknown fields."""
    assert response(b"\x0a\x02ok\x10\xc8\x01") == ("ok", 200)
    assert response(b"\x10\x94\x03\x1a\x03new\x20\x01") == ("", 404)
    assert response(b"") == ("", 0)


@pytest.mark.parametrize(
    "content",
    [
        b"\x0a",
        b"\x0a\x05ok",
        b"\x10",
        b"\x10\xff",
        b"\x10" + b"\xff" * 20,
        b"\x0d1234",
        b"\x0a\x01\xff",
    ],
)
def test_answers_that_are_none(content: bytes) -> None:
    """decoded() refuses a truncated answer, and an answer of another type."""
    with pytest.raises(JobError, match="not a DataTypeRes"):
        response(content)


SIGNAL = FaultSignal(
    uuid="u",
    job="uid",
    type="fault",
    nodes=(
        NodeFault(
            name="worker-7",
            address="10.0.0.7",
            level="UnHealthy",
            devices=(
                DeviceFault(device="3", codes=("80E01801", "80C98009"), level="RestartBusiness"),
                DeviceFault(switches=(SwitchFault(code="[0x08520003,na,L2,na]", port="2"),)),
            ),
        ),
        NodeFault(name="worker-8"),
    ),
)
ORDER = ManageSignal(
    uuid="v",
    job="uid",
    type="changeStrategy",
    actions=("change_strategy",),
    ranks=(FaultRank("3", "0"), FaultRank("11", "1")),
    strategy="retry",
    limit=-1,
)


@pytest.mark.parametrize(
    "message", [SIGNAL, ORDER, FaultResult(code=200, signal=SIGNAL), DataStatusRes(code=200)]
)
def test_messages_are_read_as_they_are_written(message: msgspec.Struct) -> None:
    """Repeated, nested and negative fields survive; a negative number has ten bytes."""
    if message is ORDER:
        ten = encoded(ORDER)[-11:]
        assert ten == b"\x38" + b"\xff" * 9 + b"\x01"
        message = msgspec.structs.replace(ORDER, limit=2**64 - 1)
    assert decoded(encoded(message), type(message)) == message


def test_numbers_of_the_fields_follow_the_proto() -> None:
    """The device's codes are field 3 of field 5 of field 4 of a fault signal."""
    signal = FaultSignal(nodes=(NodeFault(devices=(DeviceFault(codes=("80E01801",)),)),))
    assert encoded(signal) == bytes([4 << 3 | 2, 12, 5 << 3 | 2, 10, 3 << 3 | 2, 8]) + b"80E01801"
    assert encoded(ClientInfo("uid", "r")) == b"\x0a\x03uid\x12\x01r"


class Clusterd:
    """A gRPC server with ClusterD's methods and configurable answers.

    `answers`: the last one holds for each method; a stream yields all. `asked`: the requests of
    `ModifyTrainingDataTraceSwitch`.
    """

    def __init__(self) -> None:
        import grpc

        self.asked: list[bytes] = []
        self.calls: list[tuple[str, bytes]] = []
        self.answer = b"\x10\xc8\x01"
        self.answers: dict[str, list[bytes]] = {}
        self.failure = ""
        self._server = grpc.server(ThreadPoolExecutor(1))
        one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        services = {
            "TrainingDataTrace": {
                "ModifyTrainingDataTraceSwitch": one(self._modify),
                "GetTrainingDataTraceSwitch": one(self._one("get trace")),
                "SubscribeDataTraceSwitch": many(self._many("follow trace")),
            },
            "fault.Fault": {
                "Register": one(self._one("register faults")),
                "GetFaultMsgSignal": one(self._one("get faults")),
                "SubscribeFaultMsgSignal": many(self._many("follow faults")),
            },
            "Recover": {
                "Init": one(self._one("init")),
                "Register": one(self._one("register")),
                "SubscribeProcessManageSignal": many(self._many("follow orders")),
            },
        }
        for name, methods in services.items():
            generic = grpc.method_handlers_generic_handler(name, methods)
            self._server.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _modify(self, content: bytes, context: Any) -> bytes:
        import grpc

        self.asked.append(content)
        if self.failure:
            context.abort(grpc.StatusCode.UNKNOWN, self.failure)
        return self.answer

    def _one(self, name: str) -> Callable[[bytes, Any], bytes]:
        def handle(content: bytes, context: Any) -> bytes:
            self.calls.append((name, content))
            return self.answers.get(name, [encoded(Status(200))])[-1]

        return handle

    def _many(self, name: str) -> Callable[[bytes, Any], Iterator[bytes]]:
        def handle(content: bytes, context: Any) -> Iterator[bytes]:
            self.calls.append((name, content))
            yield from self.answers.get(name, [])

        return handle

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def clusterd() -> Iterator[Clusterd]:
    pytest.importorskip("grpc")
    server = Clusterd()
    yield server
    server.close()


def test_clusterd_is_asked(clusterd: Clusterd) -> None:
    """ClusterD gets the message, and the error has the text of its refusal or failure."""
    modify_trace(clusterd.address, "default/demo", ALL)
    assert clusterd.asked == [request("default/demo", ALL)]
    clusterd.answer = b"\x0a\x06no job\x10\x94\x03"
    with pytest.raises(JobError, match="refuses with code 404: no job"):
        modify_trace(clusterd.address, "default/demo", ALL)
    clusterd.failure = "notify subscriber failed"
    with pytest.raises(JobError, match="UNKNOWN: notify subscriber failed"):
        modify_trace(clusterd.address, "default/demo", ALL)


def test_the_switch_is_read_and_followed(clusterd: Clusterd) -> None:
    """Get asks with the job's name, Subscribe with the uid of its workload."""
    clusterd.answers["get trace"] = [encoded(DataStatusRes("ok", SwitchWords.of(STEPS), 200))]
    assert get_trace(clusterd.address, "default/demo") == STEPS
    assert clusterd.calls == [("get trace", encoded(DataStatusReq("default/demo")))]
    stream = [encoded(DataStatusRes("", SwitchWords.of(each), 200)) for each in (ALL, Switch())]
    clusterd.answers["follow trace"] = stream
    assert list(follow_trace(clusterd.address, "uid")) == [ALL, Switch()]
    assert clusterd.calls[1:] == [("follow trace", encoded(ClientInfo("uid")))]
    clusterd.answers["get trace"] = [encoded(DataStatusRes("no job", None, 404))]
    with pytest.raises(JobError, match="refuses with code 404: no job"):
        get_trace(clusterd.address, "default/demo")


@pytest.mark.parametrize("follow", [False, True])
def test_faults_of_a_job(clusterd: Clusterd, follow: bool) -> None:
    """The client registers first. One answer has all faults, and a stream each change."""
    clusterd.answers["get faults"] = [encoded(FaultResult(200, "", SIGNAL))]
    clusterd.answers["follow faults"] = [encoded(SIGNAL), encoded(FaultSignal(type="normal"))]
    found = list(faults_of(clusterd.address, "uid", follow=follow))
    assert found == [SIGNAL, *[FaultSignal(type="normal")] * follow]
    names = ["register faults", "follow faults" if follow else "get faults"]
    assert [name for name, _ in clusterd.calls] == names
    clusterd.answers["register faults"] = [encoded(Status(402, "job not exist"))]
    with pytest.raises(JobError, match="refuses with code 402: job not exist"):
        list(faults_of(clusterd.address, "uid", follow=follow))


def test_orders_to_a_job(clusterd: Clusterd) -> None:
    """The client calls Init and Register, then it gets the orders."""
    order = msgspec.structs.replace(ORDER, limit=30)
    clusterd.answers["follow orders"] = [encoded(order)]
    assert list(orders_to(clusterd.address, "uid")) == [order]
    client = encoded(ClientInfo("uid"))
    assert clusterd.calls == [(each, client) for each in ("init", "register", "follow orders")]


def test_clusterd_that_is_not_there() -> None:
    pytest.importorskip("grpc")
    with pytest.raises(JobError, match="UNAVAILABLE"):
        modify_trace("127.0.0.1:1", "default/demo", ALL)


def test_without_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gRPC, the error names the necessary extra."""
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"rekindle\[mindcluster\]"):
        modify_trace("127.0.0.1:1", "default/demo", ALL)


# ---- in a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    with start(tmp_path_factory.mktemp("cluster"), nodes=1) as found:
        yield found


@pytest.fixture
def root(cluster: Simulated) -> Iterator[dict[str, Any]]:
    """Create the root of a job for the duration of a test."""
    labels = {"rekindle.dev/job": "demo"}
    made = cluster.create(MAPS, {"metadata": {"name": "demo", "labels": labels}})
    yield made
    cluster.delete(f"{MAPS}/demo")
    cluster.until(MAPS, lambda found: "data-trace-demo" not in found)


class Command:
    """The command line for that job."""

    def __init__(self, cluster: Simulated, capfd: pytest.CaptureFixture[str]) -> None:
        self._cluster, self._capsys = cluster, capfd

    def __call__(self, *more: str) -> tuple[int, str, str]:
        """Run the command; return exit status, output and errors."""
        where = ["--kubeconfig", str(self._cluster.kubeconfig)]
        with pytest.raises(SystemExit) as ended:
            cli.main(["kubernetes", "trace", "demo", *where, *more])
        output = self._capsys.readouterr()
        return int(ended.value.code or 0), output.out.strip(), output.err


@pytest.fixture
def trace(cluster: Simulated, root: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(cluster, capfd)


@pytest.mark.process
def test_the_command(cluster: Simulated, root: dict[str, Any], trace: Command) -> None:
    """The command writes the requested switch, also over a damaged one, and prints what is on."""
    assert trace() == (0, "off", "")
    assert trace("--on", "step") == (0, " ".join(STEPS.words), "")
    found = cluster.get(f"{MAPS}/data-trace-demo")
    assert [one["uid"] for one in found["metadata"]["ownerReferences"]] == [root["metadata"]["uid"]]
    cluster.patch(f"{MAPS}/data-trace-demo", {"data": {"profilingSwitch": "{"}})
    status, _, error = trace()
    assert status == 1
    assert "data-trace-demo" in error
    assert trace("--on", "communication,step") == (0, " ".join(ALL.words), "")
    assert trace() == (0, " ".join(ALL.words), "")
    assert trace("--off")[:2] == (0, "off")
    assert read_trace(cluster.get(f"{MAPS}/data-trace-demo")) == Switch()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--on", "everything"], "everything is not a kind of record"),
        (["--on", ""], "is not a kind of record"),
        (["--on", "step", "--namespace", "kube-system"], "no job 'demo' in namespace kube-system"),
        (["--on", "step", "--off"], "not allowed with"),
    ],
)
def test_commands_that_cannot_be(options: list[str], text: str, trace: Command) -> None:
    """The command refuses wrong options with the reason."""
    status, _, error = trace(*options)
    assert status == 2
    assert text in error


def test_pods_that_would_not_look(cluster: Simulated, trace: Command) -> None:
    """For pods without MindCluster's folders, the command names the missing setting."""
    path = "/api/v1/namespaces/default/pods"
    labels = {"rekindle.dev/job": "demo", "rekindle.dev/role": "worker"}
    container: dict[str, Any] = {"name": "c", "image": "i", "command": ["sleep", "1000"]}
    pod = {"metadata": {"name": "demo-0", "labels": labels}, "spec": {"containers": [container]}}
    cluster.create(path, pod | {"spec": {"schedulerName": "nobody", "containers": [container]}})
    status, _, error = trace("--on", "step")
    assert status == 2
    assert "data_trace: true" in error
    cluster.delete(f"{path}/demo-0", gracePeriodSeconds=0)


def test_the_command_asks_clusterd(
    clusterd: Clusterd,
    cluster: Simulated,
    trace: Command,
) -> None:
    """With --clusterd, the command only calls ClusterD. After a refusal it writes no ConfigMap."""
    named = ["--clusterd", clusterd.address]
    assert trace("--on", "step", *named)[:2] == (0, " ".join(STEPS.words))
    assert clusterd.asked == [request("default/demo", STEPS)]
    clusterd.answer = b"\x10\xf4\x03"
    status, _, error = trace("--off", *named)
    assert status == 1
    assert "refuses with code 500" in error
    assert cluster.call("GET", f"{MAPS}/data-trace-demo")[0] == 404


def test_the_command_reads_clusterds_signals(
    clusterd: Clusterd, cluster: Simulated, trace: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands find the uid of the workload, and print one line for each answer."""
    jobs = "/apis/batch/v1/namespaces/default/jobs"
    cluster.patch(f"{MAPS}/demo", {"data": {"kind": "indexed-job"}})
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}
    job = {"metadata": {"name": "demo"}, "spec": {"suspend": True, "template": template}}
    uid = cluster.create(jobs, job)["metadata"]["uid"]
    named = ["--clusterd", clusterd.address, "--kubeconfig", str(cluster.kubeconfig)]
    clusterd.answers["get trace"] = [encoded(DataStatusRes("ok", SwitchWords.of(STEPS), 200))]
    clusterd.answers["follow trace"] = [encoded(DataStatusRes("", SwitchWords.of(ALL), 200))]
    lines = [" ".join(STEPS.words), " ".join(ALL.words)]
    assert trace("--follow", "--clusterd", clusterd.address)[:2] == (0, "\n".join(lines))
    clusterd.answers["get faults"] = [encoded(FaultResult(200, "", SIGNAL))]
    clusterd.answers["follow orders"] = [encoded(msgspec.structs.replace(ORDER, limit=30))]
    for what, word in (("faults", "80E01801"), ("recovery", "change_strategy")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["kubernetes", "signals", "demo", what, *named])
        assert (ended.value.code or 0) == 0
        assert word in capfd.readouterr().out
    assert {content for name, content in clusterd.calls if name != "get trace"} == {
        encoded(ClientInfo(uid))
    }
    cluster.delete(f"{jobs}/demo")


def test_outside_of_the_cluster_clusterd_needs_an_address(trace: Command) -> None:
    """The error names the option."""
    status, _, error = trace("--follow")
    assert (status, "--clusterd HOST:PORT" in error) == (2, True)


def test_what_mindcluster_writes_is_never_put_back(cluster: Simulated, tmp_path: Path) -> None:
    """A new attempt keeps the reset-config that MindCluster has written."""
    directory = JobDirectory(tmp_path / "job")
    described = pods("ascendjob", recovery="mindcluster", device="huawei.com/Ascend910")
    directory.create(spec(job_id="kept"), logs=False)
    api = load(str(cluster.kubeconfig))
    for _ in range(2):
        Placement(directory, described, api, Hosts(api, described, tmp_path)).around(0)
        name = f"{ascend.RESET_CONFIG}kept"
        found = cluster.get(f"{MAPS}/{name}")
        assert found["metadata"]["labels"]["reset"] == "true"
        thing = written_by_clusterd("kept", RankList=[rank(1)], RetryTime=3)
        cluster.patch(f"{MAPS}/{name}", {"data": thing["data"]})
    Placement(directory, described, api, Hosts(api, described, tmp_path)).around(1)
    assert read_reset(cluster.get(f"{MAPS}/{name}")).retry_time == 3
    cluster.delete(f"{MAPS}/kept")
    api.close()
