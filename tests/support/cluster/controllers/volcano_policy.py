"""Which action of a Volcano Job's policies something asks for."""

from __future__ import annotations

from cluster.refusals import Object


def action(job: Object, task: str, event: str, codes: dict[str, int]) -> str:
    """Empty: the job is only brought into line, so pods that are missing are made anew."""
    tasks = [each for each in job["spec"]["tasks"] if each["name"] == task]
    own = [rule for each in tasks for rule in each.get("policies") or []]
    # Those of a task come before those of the job.
    for rules in (own, job["spec"].get("policies") or []):
        for rule in rules:
            if _is_for(rule, event, codes):
                return str(rule.get("action", ""))
    return ""


def _is_for(rule: Object, event: str, codes: dict[str, int]) -> bool:
    if rule.get("exitCode"):
        return event == "PodFailed" and rule["exitCode"] in codes.values()
    events = list(rule.get("events") or [])
    if rule.get("event"):
        events.append(rule["event"])
    return event in events or "*" in events
