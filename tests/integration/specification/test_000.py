"""MindCluster's "online recovery of processes": the manifest, the strategies, the start command.

`tests/support/specification/document_000.py` has the sentences that these tests prove.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from jobs import Place, Run
from specification.platform_job import shell
from waiting import wait_until

from rekindle import names
from rekindle.job.spec import JobDirectory
from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

SWITCH, SCHEDULING = "process-recover-enable", "fault-scheduling"
STRATEGY = "recover-strategy"
WORDS = ("retry", "recover", "recover-in-place", "dump", "exit")
OF_SCRIPT = ("--enable-high-availability", "--enable-hbmfault-repair")
COMMAND = ("bash", "scripts/train_start.sh", "/job/code", "/job/output", "pretrain_gpt.py")

JOB = f"""
name: gpt
program: bash
arguments: {[*COMMAND[1:], *OF_SCRIPT]}
working_directory: /job/code
nodes: 2
processes_per_node: 1
kubernetes:
  image: example.com/train-npu:1
  kind: ascendjob
  device: huawei.com/Ascend910
  recovery: mindcluster
  recover_strategy: [retry]
  ascend: {{fault_scheduling: force}}
"""

# The first start fails. The second one starts two ranks with torchrun, as the document's script.
TRAIN_START = """
export ELASTIC_PROCESS_RECOVER_ENABLE=1
export HCCL_OP_RETRY_ENABLE="L0:0, L1:1, L2:1"
export HCCL_ASYNC_ERROR_HANDLING=0
[ "$MA_PROC_START_CNT" = 1 ] && exit 3
DISTRIBUTED_ARGS="--nproc_per_node 2 --nnodes $WORLD_SIZE --node_rank $RANK \\
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT --max_restarts 5 --monitor_interval 1"
script=$3
shift 3
exec {python} -m torch.distributed.run $DISTRIBUTED_ARGS $script "$@"
"""
PRETRAIN = """
import json, os, sys

wanted = ("RANK", "WORLD_SIZE", "PROCESS_RECOVER", "ELASTIC_PROCESS_RECOVER_ENABLE")
wanted += ("HCCL_OP_RETRY_ENABLE", "HCCL_ASYNC_ERROR_HANDLING")
told = {name: os.environ.get(name) for name in wanted} | {"arguments": sys.argv[1:]}
with open("told", "a") as file:
    file.write(json.dumps(told) + "\\n")
"""


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return a folder with its own home; at the end no process may remain."""
    with Place(tmp_path_factory.mktemp("mindcluster") / "place") as found:
        yield found


def read(file: Path) -> list[dict[str, object]]:
    """Return what each rank has written, in the order of the ranks."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(found, key=lambda each: int(each["RANK"]))


# ---- the manifest


def test_the_manifest(place: Place) -> None:
    """A job file gives the labels, the annotation, the roles, the container and the variables."""
    (place.folder / "job.yaml").write_text(JOB)
    printed = shell(place, "kubernetes", "render", "job.yaml", "--job-id", "gpt")
    assert printed.status == 0, printed.err
    objects = {each["kind"]: each for each in yaml.safe_load_all(printed.out)}
    workload = objects["AscendJob"]
    assert workload["metadata"]["labels"].items() >= {SWITCH: "on", SCHEDULING: "force"}.items()
    assert workload["metadata"]["annotations"][STRATEGY] == "retry"
    roles = workload["spec"]["replicaSpecs"]
    assert {role: each["replicas"] for role, each in roles.items()} == {"Master": 1, "Worker": 1}
    for role in roles.values():
        (container,) = role["template"]["spec"]["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert container["name"] == "ascend"
        assert variables["PROCESS_RECOVER"] == "on"
        assert variables["ELASTIC_PROCESS_RECOVER_ENABLE"] == "1"


# ---- the strategies


def policy_of(place: Place, labels: dict[str, str], *words: str) -> dict[str, object]:
    """Return the policy that these labels and strategies mean."""
    metadata = {"labels": labels, "annotations": {STRATEGY: ",".join(words)}}
    (place.folder / "job.yaml").write_text(yaml.safe_dump({"metadata": metadata}))
    printed = shell(place, "policy", "job.yaml")
    assert printed.status == 0, printed.err
    found: dict[str, object] = yaml.safe_load(printed.out)
    return found


def test_combinations_of_strategies(place: Place) -> None:
    """One word and several words give the named strategies, and no other of the same level."""
    several = [WORDS[:count] for count in range(2, len(WORDS) + 1)]
    for words in [*itertools.combinations(WORDS, 1), *several]:
        policy = policy_of(place, {SWITCH: "on", SCHEDULING: "force"}, *words)
        chosen = set(policy["strategies"])
        assert chosen & {*WORDS} == {*words} - {"exit"}
        assert {"reschedule-job", "reschedule-job-isolated"} <= chosen


@pytest.mark.parametrize("switch", ["on", "off", "pause"])
def test_the_switch(place: Place, switch: str) -> None:
    """The strategies count only if the label is on."""
    policy = policy_of(place, {SWITCH: switch, SCHEDULING: "force"}, *WORDS)
    assert ("retry" in policy["strategies"]) is (switch == "on")


@pytest.mark.parametrize(
    ("labels", "words", "key"),
    [
        ({SWITCH: "yes"}, "retry", SWITCH),
        ({SWITCH: "on", SCHEDULING: "soon"}, "retry", SCHEDULING),
        ({SWITCH: "on"}, "retry;dump", STRATEGY),
    ],
    ids=["switch", "scheduling", "strategy"],
)
def test_other_words_are_refused(
    place: Place,
    labels: dict[str, str],
    words: str,
    key: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line names the label or annotation."""
    metadata = {"labels": labels, "annotations": {STRATEGY: words}}
    (place.folder / "job.yaml").write_text(yaml.safe_dump({"metadata": metadata}))
    assert shell(place, "policy", "job.yaml").status == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert key in line


# ---- the start command


def test_the_start_script(place: Place) -> None:
    """Bash starts the script, which starts torchrun. A status other than 0 starts it again."""
    (place.folder / "scripts").mkdir()
    place.script(TRAIN_START.replace("{python}", sys.executable), "scripts/train_start.sh")
    place.script(PRETRAIN, "pretrain_gpt.py")
    command = ("--max-restarts", "1", "--no-python", *COMMAND, *OF_SCRIPT)
    run = place.start(*command, env=place.environment({"PROCESS_RECOVER": "on"})).end(0)
    assert [event.strategy for event in run.events_of(journal.Decided)] == [Strategy.RESTART]
    expected = {
        "WORLD_SIZE": "2",
        "PROCESS_RECOVER": "on",
        "ELASTIC_PROCESS_RECOVER_ENABLE": "1",
        "HCCL_OP_RETRY_ENABLE": "L0:0, L1:1, L2:1",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        "arguments": [*OF_SCRIPT],
    }
    found = read(place.folder / "told")
    assert found == [expected | {"RANK": rank} for rank in ("0", "1")]


def test_the_options_of_the_start_script(place: Place) -> None:
    """`rekindle run` takes the options that the script gives to torchrun, one command per node."""
    with socket.socket() as probe:
        probe.bind((names.LOOPBACK, 0))
        port = probe.getsockname()[1]
    place.script(PRETRAIN, "pretrain_gpt.py")
    options = ["--nproc_per_node", "2", "--nnodes", "2", "--master_addr", "localhost"]
    options += ["--master_port", str(port), "--max_restarts", "5", "--monitor_interval", "10"]
    program = ["--no-python", sys.executable, "pretrain_gpt.py", *OF_SCRIPT]
    runs = [
        Run(place, [*options, "--node_rank", str(node), *program], job_id="gpt") for node in (0, 1)
    ]
    for run in runs:
        wait_until(run.has_ended, "the end of both commands")
        assert run.process.returncode == 0, run.story()
    found = read(place.folder / "told")
    assert [(each["RANK"], each["WORLD_SIZE"]) for each in found] == [
        (str(rank), "4") for rank in range(4)
    ]
    (directory,) = (place.home / "jobs").iterdir()  # the address gives its name
    assert JobDirectory(directory).spec().policy.max_restarts == 5
