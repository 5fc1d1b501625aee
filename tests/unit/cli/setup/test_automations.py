"""What the automations expect of a run."""

from __future__ import annotations


def test_a_suspended_run_is_not_silent() -> None:
    """It has no process and sends no heartbeat, so its suspension ends the wait for one."""
    from rekindle.cli.setup import automations  # Prefect takes seconds to import

    trigger = automations.crash_silent_runs(["train"], 30.0).trigger
    expected = set(trigger.model_dump()["expect"])
    assert "prefect.flow-run.Suspended" in expected
    assert "prefect.flow-run.Running" not in expected
