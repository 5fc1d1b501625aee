"""TaskD's profiling of slow nodes: the calls in a script, and the manifest.

`tests/support/specification/document_001.py` has the sentences that these tests prove. The records
and commands are tested in `tests/integration/run/test_shell.py` and `tests/unit/profiling`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml
from jobs import Place, Run
from specification.platform_job import shell

JOB = """
name: mixtral
script: pretrain.py
working_directory: /job/code
nodes: 2
processes_per_node: 8
kubernetes:
  image: example.com/train-npu:1
  namespace: default
  kind: ascendjob
  device: huawei.com/Ascend910
  recovery: mindcluster
  ascend: {fault_scheduling: force}
"""

# The calls of the document. Rank 1 has a package with TaskD's name, as an image with its wheel.
SCRIPT = """
import json, os, sys, threading

rank = int(os.environ["RANK"])
if rank == 1:
    sys.path.insert(0, "wheels")
import taskd
import taskd.python.adaptor.patch
from taskd.api import init_taskd_manager, start_taskd_manager
from taskd.api.taskd_proxy_api import init_taskd_proxy
from taskd.api.taskd_worker_api import init_taskd_worker
from taskd.api.taskd_worker_api import start_taskd_worker
from taskd.python.framework.common.type import CONFIG_UPSTREAMIP_KEY, LOCAL_HOST

told = {}
size = {"job_id": os.getenv("MINDX_TASK_ID"), "node_nums": 1, "proc_per_node": 2}
told["manager"] = [init_taskd_manager(size), start_taskd_manager()]
told["other size"] = init_taskd_manager(size | {"node_nums": 3})
config = {CONFIG_UPSTREAMIP_KEY: os.getenv("MS_SCHED_HOST", LOCAL_HOST)}
proxy = threading.Thread(target=init_taskd_proxy, args=(config,))
proxy.daemon = True
proxy.start()
told["early"] = start_taskd_worker()
told["worker"] = [init_taskd_worker(rank, 5000), start_taskd_worker()]
told["named"] = init_taskd_worker(rank, upper_limit_of_disk_in_mb=100, framework="pt")
told["other rank"] = init_taskd_worker(7)
with open(f"told-{rank}", "w") as file:
    json.dump(told, file)
"""
OURS = {
    "manager": [True, True],
    "other size": False,
    "early": False,
    "worker": [True, True],
    "named": True,
    "other rank": False,
}
INSTALLED = "installed"  # what the functions of the package in the folder return


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return a folder with its own home; at the end no process may remain."""
    with Place(tmp_path_factory.mktemp("taskd") / "place") as found:
        yield found


@pytest.fixture(scope="module")
def called(place: Place) -> Run:
    """Return an ended job whose ranks make all calls."""
    functions = "def {0}(*_, **__): return 'installed'\n"
    names = {
        "api/__init__": ("init_taskd_manager", "start_taskd_manager"),
        "api/taskd_proxy_api": ("init_taskd_proxy",),
        "api/taskd_worker_api": ("init_taskd_worker", "start_taskd_worker"),
    }
    constants = "CONFIG_UPSTREAMIP_KEY, LOCAL_HOST = 'UpstreamIp', '127.0.0.1'\n"
    texts = {path: "".join(map(functions.format, each)) for path, each in names.items()}
    for path, text in (texts | {"python/framework/common/type": constants}).items():
        file = place.folder / "wheels" / "taskd" / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (place.folder / "wheels" / "taskd" / "python" / "adaptor").mkdir()
    (place.folder / "wheels" / "taskd" / "python" / "adaptor" / "patch.py").touch()
    (place.folder / "wheels" / "taskd" / "__init__.py").touch()
    return place.start("--nproc-per-node", "2", place.script(SCRIPT)).end(0)


def test_the_calls_of_the_script(called: Run) -> None:
    """Each name exists, accepts what fits the job, and refuses the rest with one line."""
    assert json.loads((called.place.folder / "told-0").read_text()) == OURS
    story = called.story()
    assert "init_taskd_manager got node_nums 3, and this job has 1" in story
    assert "call init_taskd_worker before start_taskd_worker" in story
    assert "init_taskd_worker got the rank 7, and this is rank 0" in story
    assert "REKINDLE_PROFILING_CAP_MB=100" in story


def test_an_installed_taskd_stays(called: Run) -> None:
    """The names of an installed package are its own."""
    told = json.loads((called.place.folder / "told-1").read_text())
    assert told["manager"] == told["worker"] == [INSTALLED, INSTALLED]
    assert told["other rank"] == INSTALLED


def test_the_manifest(place: Place) -> None:
    """All pods have TaskD's port, the folder of the records, and the file of the switch."""
    (place.folder / "job.yaml").write_text(JOB)
    printed = shell(place, "kubernetes", "render", "job.yaml", "--job-id", "mixtral")
    assert printed.status == 0, printed.err
    objects = {each["kind"]: each for each in yaml.safe_load_all(printed.out)}
    for role in objects["AscendJob"]["spec"]["replicaSpecs"].values():
        pod = role["template"]["spec"]
        (container,) = pod["containers"]
        assert {"containerPort": 9601, "name": "taskd-port"} in container["ports"]
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        hosts = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
        assert hosts[mounts["/user/cluster-info/profiling"]] == "/user/cluster-info/profiling"
        switch = hosts[mounts["/user/cluster-info/datatrace-config"]]
        assert switch == "/user/cluster-info/datatrace-config/default.data-trace-mixtral"
