"""What a pod's failure means for its Job: the pod failure policy."""

from __future__ import annotations

from cluster.controllers import indexes
from cluster.controllers.pods import exit_codes
from cluster.refusals import Object

COUNT, IGNORE, FAIL_JOB, FAIL_INDEX = "Count", "Ignore", "FailJob", "FailIndex"


def judge(job: Object, pod: Object) -> tuple[str, str]:
    """The action of the first rule that the pod meets, and what is told of it."""
    rules = (job["spec"].get("podFailurePolicy") or {}).get("rules") or []
    for number, rule in enumerate(rules):
        if why := _meets(rule, pod):
            title = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            told = why.format(pod=title)
            return rule["action"], f"{told} matching {rule['action']} rule at index {number}"
    return COUNT, ""


def _meets(rule: Object, pod: Object) -> str:
    if wanted := rule.get("onExitCodes"):
        for name, code in exit_codes(pod).items():
            if wanted.get("containerName") not in (None, name) or code == 0:
                continue
            if (code in wanted["values"]) == (wanted["operator"] == "In"):
                return f"Container {name} for pod {{pod}} failed with exit code {code}"
    for pattern in rule.get("onPodConditions") or []:
        for each in (pod.get("status") or {}).get("conditions") or []:
            status = pattern.get("status", "True")
            if each["type"] == pattern["type"] and each["status"] == status:
                return f"Pod {{pod}} has condition {pattern['type']}"
    return ""


def succeeds(job: Object, succeeded: set[int]) -> bool:
    """By the success policy."""
    for rule in (job["spec"].get("successPolicy") or {}).get("rules") or []:
        among = succeeded
        if rule.get("succeededIndexes"):
            wanted = indexes.parse(rule["succeededIndexes"])
            among = succeeded & wanted
            if "succeededCount" not in rule and among != wanted:
                continue
        if len(among) >= rule.get("succeededCount", 1):
            return True
    return False
