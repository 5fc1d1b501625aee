"""States of jobs, ranks and flow runs."""

from __future__ import annotations

from reference_tables.markdown import check_names, code, page, table
from rekindle.coordinator.machine.job_state import Phase
from rekindle.coordinator.machine.ranks import Status
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.reporting import run_state

_JOB = {
    "gathering": "Agents and the ranks' store start, and the agents start the ranks.",
    "regrouping": "Ranks arrive for the next generation. The ranks of a script without a Session "
    "stay in this state until they end.",
    "restoring": "The generation is formed; ranks take their state.",
    "training": "Ranks do steps.",
    "restarting": "The agents end all ranks, to start them again.",
    "stopping": "The agents end all ranks; the job does not continue.",
    "dumping": "Nodes write the final checkpoint.",
    "ended": "The attempt is over.",
}

_ENDED = {
    "succeeded": "All ranks ended with status 0.",
    "failed": "The policy had no strategy left, or a person refused one.",
    "stopped": "A person or a signal stopped the job.",
    "rescheduled": "The next attempt of the job follows.",
    "died": "No coordinator of the job has started.",
}

_RANKS = {
    "absent": "The rank has no process.",
    "spawning": "The coordinator has ordered the agent to start the process.",
    "starting": "The process runs and has not reached its Session. A rank of a script without a "
    "Session stays in this state.",
    "leaving": "The rank leaves its step, because its generation is over.",
    "waiting": "The rank waits for the next generation.",
    "restoring": "The rank takes its state.",
    "training": "The rank does steps.",
    "ending": "The agent ends the process on order of the coordinator.",
    "exited": "The process ended with status 0.",
}

_RUNS = {
    "Running": "`RUNNING`. The ranks start, or train.",
    "Recovering": "`RUNNING`. Broken ranks are being replaced or repaired; the others wait.",
    "Restarting": "`RUNNING`. All ranks restart on their nodes.",
    "Hung": "`RUNNING`. The job made no progress, and recovers without a new placement.",
    "Rescheduling": "`RUNNING`: the job or a node gets a new place. `SCHEDULED`: Prefect will run "
    "this flow run again.",
    "Shrunk": "`RUNNING`. Training continues without some nodes.",
    "AwaitingApproval": "`PAUSED`. A person has to approve a strategy.",
    "Stopping": "`RUNNING`. The ranks end, and nodes write the final checkpoint.",
}

# Prefect's own states.
_PREFECT = {
    "Completed": "`COMPLETED`. The job has succeeded.",
    "Failed": "`FAILED`. The job has failed or was stopped, or the flow raised another error. "
    "After another error the job continues, and Prefect runs the flow run again.",
    "Crashed": "`CRASHED`. The process of the flow run ended. The job continues; the flow run is "
    "run again and adopts the job.",
    "Cancelled": "`CANCELLED`. A person cancelled the flow run, and Rekindle stopped the job. If "
    "the runner shut down, the job continues.",
}

_HEADS = ("State", "Meaning")


def states() -> str:
    """Return the page of states. Raises ValueError: a state of the source has no row here."""
    check_names("states", [phase.value for phase in Phase], _JOB)
    check_names("states", [status.value for status in Status], _RANKS)
    texts = [(name, value) for name, value in vars(run_state).items() if isinstance(value, str)]
    named = [value for name, value in texts if name.isupper() and value.isidentifier()]
    check_names("states", [each for each in named if each != RESCHEDULED], _RUNS)
    return page(
        "States",
        "## Jobs",
        "`rekindle status` prints the state of a job that runs:",
        _table(_JOB),
        "For a job that does not run it prints the outcome of the newest attempt:",
        _table(_ENDED),
        "## Ranks",
        "`rekindle status` prints the state of each rank:",
        _table(_RANKS),
        "## Flow runs",
        "The train flow names the state of its flow run. The type of the state is Prefect's.",
        _table(_RUNS),
        "These states come from Prefect:",
        _table(_PREFECT),
    )


def _table(rows: dict[str, str]) -> str:
    return table(_HEADS, [(code(state), meaning) for state, meaning in rows.items()])
