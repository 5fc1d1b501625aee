"""The page of the states of jobs, ranks and flow runs."""

from __future__ import annotations

from reference_tables.markdown import check_names, code, page, table
from rekindle.coordinator.machine.job_state import Phase
from rekindle.coordinator.machine.roster import Status
from rekindle.recovery.journal.journal import RESCHEDULED
from rekindle.reporting import run_state

_JOB = {
    "gathering": "Agents join, the ranks' store starts, and the agents start the ranks.",
    "regrouping": "Ranks leave their step, or start and reach their Session, and wait for the "
    "next generation. A script without a Session stays in this state while it trains.",
    "restoring": "The generation is formed; ranks take their state.",
    "training": "Ranks do steps.",
    "restarting": "The agents end all ranks, to start them again.",
    "stopping": "The agents end all ranks; the attempt does not continue.",
    "final-checkpoint": "Nodes write the newest snapshot as the final checkpoint, because the job "
    "ends.",
    "ended": "The attempt is over, and the coordinator is about to end. After that the outcome "
    "appears instead.",
}

_ENDED = {
    "succeeded": "All ranks ended with status 0.",
    "failed": "The policy had no strategy left, or a person refused one, or no person answered.",
    "stopped": "A person or a signal stopped the job.",
    "rescheduled": "The attempt ended for a new placement; the next attempt of the job follows.",
    "died": "No coordinator of the job has started: the job directory has a journal without an "
    "end, and no address of a coordinator (`coordinator.json`). This is rare.",
}

_CASES = [
    ("any state above, also `failed`", "exit status 0"),
    (
        "the coordinator was killed and none replaced it, so the journal has no end",
        "exit status 1: the coordinator does not answer. Start the job again with the same id",
    ),
    ("this `REKINDLE_HOME` has no job of this id", "exit status 2"),
]

_RANKS = {
    "absent": "The rank has no process.",
    "spawning": "The coordinator has ordered the agent to start the process.",
    "starting": "The process runs and has not reached its Session. A rank of a script without a "
    "Session stays in this state.",
    "leaving": "The rank leaves its step, because its generation is over.",
    "waiting": "The rank has left its step, or reached its Session, and waits for the next "
    "generation.",
    "restoring": "The rank takes its state.",
    "training": "The rank does steps.",
    "ending": "The agent ends the process on order of the coordinator.",
    "exited": "The process ended with status 0.",
}

_RUNS = {
    "Running": "`RUNNING`. The ranks start, or train.",
    "Waiting": "`RUNNING`. Before the launch of its job, the run waits for a store, a cluster or "
    "Prefect, which does not answer. The message of the state names it.",
    "Recovering": "`RUNNING`. Broken ranks are being replaced or repaired; the others wait.",
    "Restarting": "`RUNNING`. All ranks restart on their nodes.",
    "Hung": "`RUNNING`. The job made no progress, and recovers without a new placement: a rank or "
    "all ranks restart.",
    "Rescheduling": "`RUNNING`: the job or a node gets a new place. `SCHEDULED`: Prefect will run "
    "this flow run again.",
    "Shrunk": "`RUNNING`. Training continues without some nodes, until others come in their place.",
    "AwaitingDevices": "`RUNNING`. The job has not begun: another job holds a device of the "
    "machine. The message names both.",
    "AwaitingApproval": "`PAUSED`. The ranks wait: a person has to approve a strategy in the form "
    "of the flow run, within `approval_timeout_s` (one day).",
    "Stopping": "`RUNNING`. The ranks end, and nodes write the final checkpoint.",
    "CompletedWithoutCheckpoint": "`COMPLETED`. The job has finished training, but could not write "
    "its last checkpoint, and `checkpoint.required` is false.",
}

# The states that Prefect defines.
_PREFECT = {
    "Completed": "`COMPLETED`. The job has succeeded.",
    "Failed": "`FAILED`. The job has failed or was stopped, or the flow raised another error. "
    "After another error the job continues, and Prefect runs the flow run of a deployment again.",
    "Crashed": "`CRASHED`. The process of the flow run ended. The job continues. A flow run of a "
    "deployment is run again and adopts the job; another flow run is not.",
    "Cancelled": "`CANCELLED`. A person cancelled the flow run, and Rekindle stopped the job "
    "with a "
    "final checkpoint. After `Runner is shutting down.` (Prefect's runner ended and cancelled its "
    "flow runs) the job continues; a person retries the flow run, which then adopts the job.",
}

_HEADS = ("State", "Meaning")


def states() -> str:
    """Return the page of states.

    Raises ValueError: a state of the source has no row here.
    """
    check_names("states", [phase.value for phase in Phase], _JOB)
    check_names("states", [status.value for status in Status], _RANKS)
    texts = [(name, value) for name, value in vars(run_state).items() if isinstance(value, str)]
    named = [value for name, value in texts if name.isupper() and value.isidentifier()]
    check_names("states", [each for each in named if each != RESCHEDULED], _RUNS)
    return page(
        "States",
        "This page lists the states of jobs, ranks and flow runs. [Running](../operate/running.md) "
        "has the commands, and [Policy fields](policy-fields.md) the limits.",
        "## Jobs",
        "`rekindle status JOB` first prints the state of the job and its attempt, then the steps "
        "and the generation, then one row for each rank. `--json` prints the same as JSON "
        "(`state`, "
        "`attempt`, `finished`, `total`, `ranks`, ...). A job whose newest attempt has not ended "
        "has one of these states:",
        _table(_JOB),
        "A fault leads from `training` to `regrouping`, or to `restarting` if all ranks restart. "
        "A strategy that waits for approval adds two lines with the reason and the command "
        "`rekindle approve`.",
        "If the job directory has reports of bugs in Rekindle, the last lines name each error and "
        "its file.",
        "If the newest attempt has ended, the command prints its outcome, the finished steps and "
        "the reason, from the journal: `job JOB: succeeded after 300 steps: ...`.",
        _table(_ENDED),
        table(("Case", "Result of `rekindle status`"), _CASES),
        "## Ranks",
        "The last column of `rekindle status` has the state of each rank:",
        _table(_RANKS),
        "A rank that a signal or an error ended is `absent` until its new process is ordered. "
        "Evaluation, checkpoints and waits for data are a part of `training`.",
        "## Flow runs",
        "The train flow names the state of its flow run. The first word of the meaning is the type "
        "of the state in Prefect.",
        _table(_RUNS),
        "These states come from Prefect:",
        _table(_PREFECT),
    )


def _table(rows: dict[str, str]) -> str:
    return table(_HEADS, [(code(state), meaning) for state, meaning in rows.items()])
