"""A mistake in a job, a block or a store ends the flow run once, with one line that helps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect_side import Served
from servers import serving
from stores.servers import ACCESS_KEY, SECRET_KEY, Server, rclone
from training_jobs.selection import soak_but
from waiting import run_command

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("scripts") / "mistakes.py"
FOLDER = "FOLDER"  # stands for the folder of the test in a row


class Row(NamedTuple):
    """Parameters with one mistake, and the texts with the field and the remedy."""

    texts: tuple[str, ...]
    job: Mapping[str, Any] = MappingProxyType({})
    around: dict[str, Any] | None = None


def at(path: str, **more: Any) -> dict[str, Any]:
    return {"checkpoint": {"path": path, "every": 5}, **more}


TABLE = {
    "name": Row(("job.name", "such as 'my-job'"), {"name": "My Job"}),
    "job id": Row(("job.job_id", "use 1 to 63 of a-z"), {"job_id": "Not An Id"}),
    "template": Row(("{flow_run.nope}", "choose from"), {"job_id": "x-{flow_run.nope}"}),
    "empty field": Row(
        ("job_id", "this flow run has no"), {"job_id": "x-{flow_run.deployment_id}"}
    ),
    "no script": Row(("give a script, a module or a program",), {"script": ""}),
    "two entries": Row(("give a script, a module or a program",), {"module": "json.tool"}),
    "missing script": Row(("no.py does not exist", "correct its name"), {"script": "no.py"}),
    "missing module": Row(("job.module", "install"), {"script": "", "module": "no_such.thing"}),
    "framework": Row(("job.framework", "'torch' or 'mindspore'"), {"framework": "jax"}),
    "absent framework": Row(("framework is mindspore", "give"), {"framework": "mindspore"}),
    "nodes": Row(("job.nodes", "greater than or equal to 1"), {"nodes": 0}),
    "processes": Row(("job.processes_per_node", "valid integer"), {"processes_per_node": "two"}),
    "min_nodes": Row(("min_nodes is 3", "give 1 to 2"), {"nodes": 2, "min_nodes": 3}),
    "spares": Row(("job.spares", "greater than or equal to 0"), {"spares": -1}),
    "variable": Row(("REKINDLE_X", "leave it out"), {"environment": {"REKINDLE_X": "1"}}),
    "variable's name": Row(("job.environment", "'A=B'"), {"environment": {"A=B": "1"}}),
    "HCCL": Row(
        ("HCCL_CONNECT_TIMEOUT", "give"), {"environment": {"HCCL_CONNECT_TIMEOUT": "soon"}}
    ),
    "folder": Row(("working directory", "make it"), {"working_directory": "FOLDER/none"}),
    "unknown field": Row(("job.polcy", "there is no such field"), {"polcy": {}}),
    "every": Row(("job.checkpoint.every", "greater than or"), {"checkpoint": {"every": -1}}),
    "keep": Row(("job.checkpoint.keep", "best and metric"), {"checkpoint": {"keep": {"best": 1}}}),
    "snapshots": Row(("job.snapshot_every", "greater than or"), {"snapshot_every": -1}),
    "budget": Row(("job.policy.max_restarts", "greater"), {"policy": {"max_restarts": -1}}),
    "strategy": Row(("job.policy.strategies.0", "choose"), {"policy": {"strategies": ["pray"]}}),
    "node check": Row(("job.node_check.timeout_s", "greater"), {"node_check": {"timeout_s": 0}}),
    "fault tables": Row(("job.fault_tables", "no.toml"), {"fault_tables": "no.toml"}),
    "image": Row(("job.kubernetes", "image"), {"kubernetes": {"image": ""}}),
    "folder in the image": Row(
        ("working_directory", "absolute"), {"kubernetes": {"image": "a"}, "working_directory": "x"}
    ),
    "file as store": Row(("checkpoint directory", "name another"), at("FOLDER/train.py")),
    "no place": Row(("job.checkpoint.path", "/proc"), at("/proc/none")),
    "scheme": Row(("s3://bucket/prefix",), at("gs://bucket/x")),
    "bucket's name": Row(("valid name of a bucket",), at("s3://a/x")),
    "endpoint": Row(("an endpoint is",), at("s3://abc/x?endpoint=nowhere")),
    "authorities": Row(("(verify=)", "job.checkpoint.path"), at("s3://abc/x?verify=/none.pem")),
    "missing bucket": Row(("of block 'gone'", "404", "create the bucket"), {"saved_store": "gone"}),
    "wrong key": Row(("of block 'locked'", "403", "credentials"), {"saved_store": "locked"}),
    "late store": Row(("of block 'late'", "403", "right to"), {"saved_store": "late"}),
    "no block": Row(("no block 'none'", "save it"), {"saved_policy": "none"}),
    "bad policy": Row(("block 'bad'", "policy.max_restarts"), {"saved_policy": "bad"}),
    "bad cluster": Row(("min_nodes is 3", "give 1 to 2"), {"saved_cluster": "contradiction"}),
    "block's variable": Row(("'A=B'", "environment"), {"saved_cluster": "odd"}),
    "half a key": Row(("block 'half'", "as well"), {"saved_store": "half"}),
    "unmeasured": Row(("at_least limits loss", "give evaluate"), around={"at_least": {"loss": 1}}),
    "limits": Row(
        ("around", "correct one"),
        around={"at_least": {"a": 2}, "at_most": {"a": 1}, "evaluate": ["true"]},
    ),
    "command": Row(("around.evaluate", "install"), around={"evaluate": ["no-such-program"]}),
    "nothing to publish": Row(("job.checkpoint.every", "steps"), {"checkpoint": {}}, around={}),
    "published": Row(("around.publish_to", "is a file"), around={"publish_to": "train.py"}),
    "downstream": Row(("around.downstream", "deploy it"), around={"downstream": ["no/one"]}),
}

# One row of each kind of check.
COMMON = ("name", "two entries", "missing script", "strategy", "no place", "missing bucket")
COMMON += ("wrong key", "late store", "bad policy", "half a key", "unmeasured", "downstream")


class End(NamedTuple):
    """The end of a run: its type, the message of its state, its logs, and all its states."""

    type: str
    message: str
    logs: str
    states: dict[str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory with a script."""
    found = tmp_path_factory.mktemp("mistakes")
    (found / "train.py").touch()
    return found


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a real S3 server, which compares keys."""
    with rclone(tmp_path_factory.mktemp("bucket")) as server:
        yield server


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, prefect_api: str, folder: Path, s3: Server
) -> dict[str, End]:
    """Run the rows of the selected tests in one other process, and return the end of each run.

    A second store answers the first request with 503, and all others with 403.
    """
    answers = iter((503,))

    def fail(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        request.send_error(next(answers, 403))

    selected = {each.name for each in request.session.items}
    runs = {}
    for name, row in TABLE.items():
        if not any(each.endswith(f"[{name}]") for each in selected):
            continue
        job = {"script": "train.py", "working_directory": "FOLDER", "checkpoint": {"every": 5}}
        given: dict[str, Any] = {"job": {**job, **row.job}}
        if row.around is not None:
            given["around"] = row.around
        runs[name] = ("train" if row.around is None else "retrain", given)
    text = json.dumps(runs).replace(FOLDER, str(folder))
    (folder / "runs.json").write_text(text)
    command = [sys.executable, str(SCRIPT), str(folder), s3.endpoint, ACCESS_KEY, SECRET_KEY]
    env = {"PREFECT_API_URL": prefect_api, "REKINDLE_HOME": str(folder / "home")}
    with serving(fail) as port:
        command.append(f"http://127.0.0.1:{port}")
        done = run_command(command, env={**os.environ, **env}, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "ends.json").read_text())
    with SyncPrefectClient(prefect_api) as client:

        def logs(run: str) -> str:
            mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[UUID(run)]))
            return "\n".join(each.message for each in client.read_logs(mine))

        def states(run: str) -> dict[str, str]:
            return {s.name or "": s.message or "" for s in client.read_flow_run_states(UUID(run))}

        return {
            name: End(kind, text, logs(run), states(run))
            for name, (kind, text, run, _) in found.items()
        }


@pytest.mark.parametrize("name", soak_but(TABLE, *COMMON))
def test_a_mistake_ends_the_run_with_one_line(ends: dict[str, End], name: str) -> None:
    """The run fails. The message of its state has the field and the remedy, and is one line.

    The log has no traceback, and says that no hook runs it again. No text has the value of a key.
    """
    end = ends[name]
    assert end.type == "FAILED"
    assert end.message.startswith("The job cannot start: ")
    for text in TABLE[name].texts:
        assert text in end.message
    assert "\n" not in end.message
    assert "Traceback" not in end.logs
    assert "Rekindle does not restart this run" in end.logs
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert secret not in end.message + end.logs


def test_a_store_that_does_not_answer_is_waited_for(ends: dict[str, End]) -> None:
    """The run has the state Waiting, and its message has the field and the cause."""
    message = ends["late store"].states["Waiting"]
    assert message.startswith("checkpoint.path of block 'late': ")
    assert "the server answered 503" in message
    assert "Rekindle tries again until it answers" in message


def test_no_mistake_leaves_anything_behind(ends: dict[str, End], folder: Path) -> None:
    """There is no job directory and no probe."""
    assert ends
    assert not list((folder / "home").glob("jobs/*"))
    assert not list(folder.rglob(".rekindle-probe-*"))


def test_a_served_run_with_a_mistake_runs_once(served: Served) -> None:
    """No hook schedules the run of a deployment again."""
    run = served.start(script="no-such.py")
    assert run.until_final().is_failed()
    run.until(lambda: "does not restart this run" in run.logs(), "the hook has decided")
    assert run.states().count("Running") == 1
    assert run.states()[-1] == "Failed"
