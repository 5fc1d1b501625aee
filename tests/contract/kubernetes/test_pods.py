"""Test pods: variables, volumes, restarts, logs, probes, and the status after the end."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from cluster.launch import Simulated
from cluster.manifests import IMAGE, config_map, pod
from cluster.spaces import Space
from kubernetes import client
from waiting import bound_s, wait_until

Object = dict[str, Any]


def log(space: Space, name: str, **query: Any) -> str:
    core = client.CoreV1Api(space.cluster.admin)
    return str(core.read_namespaced_pod_log(name, space.name, **query))


def ended(space: Space, name: str) -> Object:
    """Return the pod once it has succeeded or failed."""
    found: Object = space.cluster.until(
        space.pods,
        lambda found: found[name]["status"]["phase"] in ("Succeeded", "Failed") and found[name],
    )
    return found


def terminated(thing: Object) -> Object:
    return dict(thing["status"]["containerStatuses"][0]["state"]["terminated"])


def test_variables(space: Space) -> None:
    """Variables get values from other variables, fields, ConfigMaps and Secrets.

    The kubelet replaces $(NAME) in the command and its arguments.
    """
    place = f"/api/v1/namespaces/{space.name}"
    space.cluster.create(f"{place}/configmaps", config_map("settings", one="1", two="2"))
    secret = {"metadata": {"name": "hidden"}, "stringData": {"word": "open"}}
    space.cluster.create(f"{place}/secrets", secret)
    wanted = pod("one", labels={"rank": "7"})
    container = wanted["spec"]["containers"][0]
    container["envFrom"] = [{"configMapRef": {"name": "settings"}, "prefix": "C_"}]
    container["env"] = [
        {"name": "A", "value": "a"},
        {"name": "B", "value": "$(A)b$(NONE)$$(A)"},
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['rank']"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "TWO", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "two"}}},
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "word"}}},
    ]
    script = 'echo "$B $RANK $IP $NODE $TWO $WORD $C_one $HOSTNAME" "$@"'
    container["command"] = ["sh", "-c", script, "sh"]
    container["args"] = ["$(A)-$(RANK)"]
    space.cluster.create(space.pods, wanted)
    status = ended(space, "one")
    address, node = status["status"]["podIP"], status["spec"]["nodeName"]
    expected = f"ab$(NONE)$(A) 7 {address} {node} 2 open 1 one a-7\n"
    assert log(space, "one") == expected


def test_what_is_missing_is_waited_for(space: Space) -> None:
    """A pod waits with CreateContainerConfigError until its ConfigMap exists."""
    wanted = pod("one", "true")
    source = {"configMapKeyRef": {"name": "late", "key": "x"}}
    wanted["spec"]["containers"][0]["env"] = [{"name": "X", "valueFrom": source}]
    space.cluster.create(space.pods, wanted)

    def waits(found: dict[str, Object]) -> bool:
        statuses = found["one"]["status"].get("containerStatuses") or []
        waiting = statuses[0]["state"].get("waiting") if statuses else None
        return bool(waiting and waiting["reason"] == "CreateContainerConfigError")

    space.cluster.until(space.pods, waits)
    path = f"/api/v1/namespaces/{space.name}/configmaps"
    space.cluster.create(path, config_map("late", x="1"))
    assert ended(space, "one")["status"]["phase"] == "Succeeded"


def test_how_it_ended(space: Space) -> None:
    """The status of an ended container has its message, and its exit code or 128 plus the signal.

    `FallbackToLogsOnError` uses the end of the log as the message.
    """
    text = 'echo told > "${TERMINATION_LOG:-/dev/termination-log}"; exit 75'
    space.cluster.create(space.pods, pod("code", text))
    space.cluster.create(space.pods, pod("signal", "kill -9 $$$$"))
    silent = pod("silent", "echo last words; exit 1")
    silent["spec"]["containers"][0]["terminationMessagePolicy"] = "FallbackToLogsOnError"
    space.cluster.create(space.pods, silent)
    found = terminated(ended(space, "code"))
    assert (found["exitCode"], found["reason"], found["message"]) == (75, "Error", "told\n")
    assert terminated(ended(space, "signal"))["exitCode"] == 137
    assert terminated(ended(space, "silent"))["message"].strip() == "last words"


def test_crashes_are_waited_for_longer_and_longer(space: Space) -> None:
    """With restartPolicy Always, a pod that fails again waits with CrashLoopBackOff.

    `lastState` and the previous log keep the result of the last run.
    """
    wanted = pod("one", "echo run; exit 3")
    wanted["spec"]["restartPolicy"] = "Always"
    space.cluster.create(space.pods, wanted)

    def is_waiting(found: dict[str, Object]) -> Object | None:
        statuses = found["one"]["status"].get("containerStatuses") or [{}]
        waiting = statuses[0].get("state", {}).get("waiting") or {}
        return statuses[0] if waiting.get("reason") == "CrashLoopBackOff" else None

    found = space.cluster.until(space.pods, is_waiting)
    assert found["restartCount"] >= 1
    assert found["lastState"]["terminated"]["exitCode"] == 3
    assert space.cluster.get(f"{space.pods}/one")["status"]["phase"] == "Running"
    assert log(space, "one", previous=True) == "run\n"
    space.cluster.until(
        f"/api/v1/namespaces/{space.name}/events",
        lambda found: any(
            each["reason"] == "BackOff" and each["involvedObject"]["name"] == "one"
            for each in found.values()
        ),
    )


def test_a_rule_restarts_in_place(space: Space) -> None:
    """A restart rule for an exit code restarts the container in the same pod.

    `lastState` keeps the exit code.
    """
    wanted = pod("one", "")
    rule = {"action": "Restart", "exitCodes": {"operator": "In", "values": [75]}}
    script = 'test -e "$HOME/again" && exec sleep 60; touch "$HOME/again"; exit 75'
    container = wanted["spec"]["containers"][0]
    container.update(command=["sh", "-c", script], restartPolicy="Never", restartPolicyRules=[rule])
    space.cluster.create(space.pods, wanted)
    found = space.cluster.until(
        space.pods,
        lambda found: (
            (found["one"]["status"].get("containerStatuses") or [{}])[0].get("started")
            and found["one"]["status"]["containerStatuses"][0]["restartCount"] == 1
            and found["one"]
        ),
    )
    last = found["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert last["exitCode"] == 75


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("missing.example.com/none:1", "ImagePullBackOff"),
        ("No such:image!", "InvalidImageName"),
    ],
)
def test_images_that_are_not_there(image: str, reason: str, space: Space) -> None:
    """If an image is missing or invalid, the pod is Pending and its container has the reason."""
    wanted = pod("one")
    wanted["spec"]["containers"][0]["image"] = image
    space.cluster.create(space.pods, wanted)

    def waits(found: dict[str, Object]) -> bool:
        statuses = found["one"]["status"].get("containerStatuses") or [{}]
        waiting = statuses[0].get("state", {}).get("waiting") or {}
        return waiting.get("reason") == reason

    space.cluster.until(space.pods, waits)
    assert space.cluster.get(f"{space.pods}/one")["status"]["phase"] == "Pending"


def test_logs(space: Space) -> None:
    """A log request can follow the log to its end, limit its lines, and add times.

    An unknown container and a missing previous run get 400.
    """
    script = "for i in 1 2 3; do echo line $i; sleep 0.2; done"
    space.cluster.create(space.pods, pod("one", script))
    space.cluster.until(space.pods, lambda found: found["one"]["status"]["phase"] != "Pending")
    core = client.CoreV1Api(space.cluster.admin)
    response = core.read_namespaced_pod_log("one", space.name, follow=True, _preload_content=False)
    assert b"".join(response.stream()) == b"line 1\nline 2\nline 3\n"
    response.close()
    ended(space, "one")
    assert log(space, "one", tail_lines=1) == "line 3\n"
    times = [line.split(" ")[0] for line in log(space, "one", timestamps=True).splitlines()]
    assert times == sorted(times)
    assert all(time.endswith("Z") for time in times)
    assert log(space, "one", since_seconds=3600).count("\n") == 3
    code, answer = space.cluster.call("GET", f"{space.pods}/one/log?container=none")
    assert (code, answer["reason"]) == (400, "BadRequest")
    code, _ = space.cluster.call("GET", f"{space.pods}/one/log?previous=true")
    assert code == 400


def test_a_log_ends_with_its_run(space: Space) -> None:
    """A followed log ends with the run of its container, even if the container restarts."""
    wanted = pod("one", "echo run; mkdir $MADE 2>&- || sleep 600; sleep 3; exit 1")
    wanted["spec"]["restartPolicy"] = "OnFailure"
    wanted["spec"]["volumes"] = [{"name": "made", "emptyDir": {}}]
    container = wanted["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "made", "mountPath": "/made"}]
    container["env"] = [{"name": "MADE", "value": "/made/before"}]
    space.cluster.create(space.pods, wanted)

    def has_begun_again(found: dict[str, Object]) -> bool:
        status = found["one"]["status"]["containerStatuses"][0]
        return status["restartCount"] == 1 and "running" in status["state"]

    space.cluster.until(space.pods, lambda found: found["one"]["status"]["phase"] != "Pending")
    core = client.CoreV1Api(space.cluster.admin)
    response = core.read_namespaced_pod_log(
        "one", space.name, follow=True, _preload_content=False, _request_timeout=bound_s(30)
    )
    assert b"".join(response.stream()) == b"run\n"
    response.close()
    space.cluster.until(space.pods, has_begun_again)
    assert log(space, "one") == "run\n"


def test_readiness(space: Space) -> None:
    """A pod with a failing readiness probe gets no requests through its service."""
    script = 'mkdir -p "$HOME/w"; cd "$HOME/w"; exec python3 -m http.server -b "$IP" 8000'
    wanted = pod("one", script, labels={"app": "web"})
    container = wanted["spec"]["containers"][0]
    source = {"fieldRef": {"fieldPath": "status.podIP"}}
    container["env"] = [{"name": "IP", "valueFrom": source}]
    container["ports"] = [{"name": "web", "containerPort": 8000}]
    container["readinessProbe"] = {"httpGet": {"path": "/now", "port": "web"}, "periodSeconds": 1}
    space.cluster.create(space.pods, wanted)
    port = {"name": "http", "port": 80, "targetPort": "web"}
    service = {"metadata": {"name": "s"}, "spec": {"selector": {"app": "web"}, "ports": [port]}}
    place = f"/api/v1/namespaces/{space.name}"
    space.cluster.create(f"{place}/services", service)
    space.cluster.until(space.pods, lambda found: found["one"]["status"]["phase"] == "Running")
    path = f"{place}/services/http:s:http/proxy/now"
    code, answer = space.cluster.call("GET", path)
    assert (code, answer["reason"]) == (503, "ServiceUnavailable")
    assert "no endpoints available" in answer["message"]


@pytest.mark.simulated
def test_volumes(space: Space) -> None:
    """A container can read a ConfigMap volume and write to an emptyDir volume.

    The simulated kubelet supports only mount paths below its root folder.
    """
    cluster = space.cluster
    assert isinstance(cluster, Simulated)
    place = f"/api/v1/namespaces/{space.name}"
    cluster.create(f"{place}/configmaps", config_map("files", **{"a.txt": "content"}))
    root = cluster.root / "mounts" / space.name
    wanted = pod("one", f"cat {root}/config/a.txt; echo x > {root}/scratch/y; ls {root}/scratch")
    wanted["spec"]["volumes"] = [
        {"name": "config", "configMap": {"name": "files"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    wanted["spec"]["containers"][0]["volumeMounts"] = [
        {"name": name, "mountPath": str(root / name)} for name in ("config", "scratch")
    ]
    cluster.create(space.pods, wanted)
    ended(space, "one")
    assert log(space, "one") == "contenty\n"
    cluster.delete(f"{space.pods}/one")
    cluster.until(space.pods, lambda found: not found)


@pytest.mark.simulated
def test_out_of_memory_on_demand(space: Space) -> None:
    """The annotation oom-after ends a container with exit code 137 and the reason OOMKilled."""
    annotations = {"test.rekindle.dev/oom-after": "0.2"}
    space.cluster.create(space.pods, pod("one", annotations=annotations))
    found = terminated(ended(space, "one"))
    assert (found["exitCode"], found["reason"]) == (137, "OOMKilled")


@pytest.mark.simulated
def test_nothing_outlives_its_pod(space: Space, tmp_path: Path) -> None:
    """If a pod ends, the kubelet also ends the processes that started their own session."""
    file = tmp_path / "pid"
    script = f"setsid sleep 60 & echo $! > {file}.part; mv {file}.part {file}; sleep 0.3"
    space.cluster.create(space.pods, pod("one", script))
    ended(space, "one")
    wait_until(lambda: is_gone(int(file.read_text())), "the end of the process")


@pytest.mark.simulated
def test_nothing_outlives_a_killed_kubelet(cluster: Simulated, tmp_path: Path) -> None:
    """If the kubelet is killed, the processes of its pods end."""
    file = tmp_path / "pid"
    script = f"setsid sleep 60 & echo $! > {file}.part; mv {file}.part {file}; exec sleep 60"
    space = Space(cluster, "default")
    cluster.create(space.pods, pod("one", script))
    space.running(1)
    wait_until(file.exists, "the process of the pod")
    cluster.kill_kubelet()
    wait_until(lambda: is_gone(int(file.read_text())), "the end of the process")


def is_gone(process: int) -> bool:
    """Return whether a process has ended; a zombie process counts as ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_init_containers_come_first(space: Space) -> None:
    """Init containers run before the containers of the pod.

    If an init container fails, the pod fails.
    """
    wanted = pod("one", "true")
    init = {"name": "before", "image": IMAGE, "command": ["sh", "-c", "exit 4"]}
    wanted["spec"]["initContainers"] = [init]
    space.cluster.create(space.pods, wanted)
    found = ended(space, "one")
    assert found["status"]["phase"] == "Failed"
    state = found["status"]["initContainerStatuses"][0]["state"]
    assert state["terminated"]["exitCode"] == 4


def test_secrets_are_encoded(space: Space) -> None:
    """The server stores `stringData` of a Secret, encoded, as `data`."""
    path = f"/api/v1/namespaces/{space.name}/secrets"
    made = space.cluster.create(path, {"metadata": {"name": "a"}, "stringData": {"x": "y"}})
    assert made["data"] == {"x": base64.b64encode(b"y").decode()}
    assert "stringData" not in made
