"""The page of all journal events and their fields."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from reference_tables.markdown import check_names, code, codes, page, table
from rekindle import names
from rekindle.profiling.findings import Finding
from rekindle.profiling.switch import Switch
from rekindle.recovery.faults.classification import HealthEvent
from rekindle.recovery.faults.fault import Fault
from rekindle.recovery.journal import journal
from rekindle.recovery.journal.event import Event
from rekindle.recovery.node_check.verdicts import NodeVerdict
from rekindle.recovery.policy.plan import StateSource

# The meaning of each event, by its tag.
EVENTS = {
    "answered": "A person approved or refused a strategy, or the time for the answer passed.",
    "checkpoint-failed": "A checkpoint could not be written; training continues. It is an incident "
    "of its own, of kind `storage`.",
    "checkpoint-interval": "The number of steps between two checkpoints changes.",
    "checkpoint-left-out": "A checkpoint was due and was not written: the store was busy.",
    "checkpoint-skipped": "A restore did not use a newer checkpoint, because it is not valid.",
    "checkpointed": "A checkpoint is complete.",
    "checkpoints-pruned": "The job removed checkpoints that no rule keeps.",
    "decided": "The coordinator decided how to handle a fault. Each decision counts against the "
    "limits "
    "of the policy.",
    "ended": "The attempt is over. After the outcome `rescheduled` the next attempt of the job "
    "starts "
    "at once; after the other outcomes the job is over.",
    "examined": "The job checked a node while training was paused.",
    "fault": "A fault. It opens an incident, or belongs to the open one. An incident ends with its "
    "`first-step`, or with the attempt.",
    "first-step": "All ranks of the generation finished their first step, so training continues. "
    "It "
    "closes the incident.",
    "formed": "A generation formed: all ranks are there and know the source of their state. The "
    "recovery lost `newest` - `step` finished steps; a negative number counts as 0.",
    "isolated": "The engine places nothing more on this host.",
    "job-started": "The coordinator of an attempt started.",
    "final-checkpoint": "A node begins to write the final checkpoint (`path` and `error` are "
    "empty), has written it (`path`), or could not (`error`).",
    "move-ended": "The job gave a planned move up. The node keeps its agent.",
    "move-late": "The deadline of a planned move has passed, and the node has not moved. The ranks "
    "write a checkpoint; the move continues.",
    "move-requested": "A node is to move to another agent. The move is an incident of its own, of "
    "kind `planned`, which uses up no budget.",
    "moved": "Another agent has taken the place of a node that was to move. The next `first-step` "
    "closes the incident.",
    "node-checked": "The job checked a node before it took the node in.",
    "node-joined": "An agent joined the job.",
    "node-left": "An agent left, and the job did not need it.",
    "node-wanted": "The coordinator requests an agent for this node rank.",
    "profiled": "Light profiling of the ranks was switched.",
    "progress": "Progress of the ranks. Only followers of the event stream get it. It is not in "
    "the "
    "file, and its `seq` is 0. The steps and losses of a job are in the files "
    "`metrics/rank<r>.jsonl` "
    "of the job directory.",
    "ranks-differ": "Ranks hold different values of an object outside of the parameters and the "
    "optimizer's state. Recorded once for each object; training continues.",
    "ranks-started": "An agent started processes of ranks.",
    "reset-skipped": "A rank has started without the reset of its device, because the agent could "
    "not try it.",
    "restored": "Every rank of the generation has its state.",
    "health-event": "A monitor or a person reported a health event.",
    "slow-over": "A rank, node or link is no longer slow, without any action.",
    "slowed": "A rank, node or link has become slow.",
    "spare-lost": "The agent of a spare node is gone.",
    "step-skipped": "All ranks skipped a step, because its update would have damaged the model "
    "(`Session(guard=...)`); training continues. It is an incident of its own, of kind "
    "`skipped-step`.",
    "stopping": "The coordinator ends the ranks permanently. A later event of this type replaces "
    "its "
    "outcome.",
    "suspected": "The states of all ranks after step `valid_steps` may be wrong. The job does not "
    "use them again.",
}

# The meaning of each field. A name with a dot applies to one event only.
FIELDS = {
    "address": "Address of the agent's machine.",
    "answered.by": "The person, or the reason why there is no answer.",
    "apart": (
        "Whether the restart belongs to ranks that do not train together, and does not use up "
        "`max_restarts`."
    ),
    "approval": "Whether a person has to approve the strategy first.",
    "at": "Time of the event, in seconds since the epoch.",
    "attempt": "Number of the attempt. The first one is 0 with `rekindle run`, and 1 in a flow.",
    "bytes": "Size, in bytes.",
    "began": "When training paused for the move, in seconds since the epoch; 0: the ranks waited "
    "for another reason.",
    "by": "Who switched it.",
    "deadline": "When the node may end, in seconds since the epoch; 0: no deadline.",
    "move-requested.by": "The person or monitor that requested the move.",
    "moved.address": "Address of the agent that the job left.",
    "moved.pid": "Process id of the agent that the job left.",
    "checkpoint-interval.seconds": "About how many seconds these steps take; 0: unknown.",
    "checkpointed.seconds": "Duration of the write, in seconds.",
    "valid_steps": "Number of steps after which the state is still right.",
    "error": "Why it failed; empty: it did not fail.",
    "explanation": "Meaning of the health event, by the fault tables.",
    "fault": "The fault; see below.",
    "finding": "What is slow; see below.",
    "finished": "Steps that all ranks have finished.",
    "generation": "Number of the generation.",
    "granted": "Whether the strategy may be used.",
    "host": "Name of the host.",
    "hosts": "Names of the hosts.",
    "incident": "Number of the incident, from 1; 0: none.",
    "isolate": "Whether the job isolates the node.",
    "item": "Name of the object.",
    "job_id": "The job's id.",
    "explained": "`true`: this event replaces an earlier `fault` of the incident, because a later "
    "report "
    "explains its cause.",
    "left": "Spare nodes that are left.",
    "left_out": "Node ranks that take no part.",
    "outweighed": "`true`: an earlier decision of this incident chose a strategy that is further "
    "to the right among the values of `strategy` above. `rekindle incidents` leaves this decision "
    "out, and shows the earlier one.",
    "state_generation": "Generation that made the state of this step.",
    "metrics": "Values that rank 0 logged, by name.",
    "newest": "Finished steps of the rank that is furthest ahead. In `formed` the field has "
    "another meaning.",
    "formed.newest": "Finished steps of the rank that was furthest behind when the incident "
    "began: all ranks had finished these.",
    "node": "Node rank; -1: a spare node.",
    "nodes": "Node ranks.",
    "job-started.nodes": "Number of nodes.",
    "outcome": "`succeeded`, `failed`, `stopped` or `rescheduled`.",
    "path": "Location of the checkpoint.",
    "pid": "Process id of the agent.",
    "job-started.pid": "Process id of the coordinator.",
    "processes_per_node": "Ranks of each node.",
    "rank": "The rank that reported it.",
    "ranks": "The ranks.",
    "reason": "Why, in a sentence.",
    "removed": "The checkpoints, each as step and generation.",
    "replaced": "Whether another agent replaces it.",
    "restart": "Restarts of all ranks so far in this attempt.",
    "resumed": "Finished steps from which all ranks last began to train together.",
    "roll_back": "Whether the ranks take an older state.",
    "seq": "Number of the event; each event has the next number.",
    "health_event": "The health event; see below.",
    "since": "Time at which recording was first switched on, in seconds since the epoch.",
    "sources": "Number of ranks by the source of their state; see below.",
    "spares": "Number of spare nodes.",
    "step": "Finished steps.",
    "formed.step": "Finished steps from which all ranks continue.",
    "steps": "Steps between two checkpoints.",
    "strategy": "The strategy.",
    "suspect": "Whether the node is slow (true) or a reference (false).",
    "switch": "The kinds of records that are on; see below.",
    "then": "The reaction.",
    "total": "Steps of the whole run.",
    "urgency": "Urgency, by the fault tables.",
    "verdict": "The result of the check; see below.",
    "world_size": "Ranks in the world.",
    "would": "Whether the reaction only would follow (`stragglers_shadow`).",
}

# Values that occur in several events.
PARTS = {
    Fault: {
        "kind": "Kind of the fault: [the kinds](../recover/faults.md).",
        "message": "One line that describes it.",
        "rank": "Rank; -1: none.",
        "node": "Node rank; -1: none.",
        "finished": "Steps that the rank had finished.",
        "signature": "Text that two equal faults have in common; empty: unknown.",
        "traceback": "Traceback of the rank's exception.",
        "at": "Time, in seconds since the epoch.",
        "host": "Name of the host; empty: unknown.",
        "device": "Number of the device on its node; -1: none.",
        "code": "Fault code, as in the fault tables.",
        "user_caused": "Whether the script or its input caused it.",
        "reset_helps": "Whether the device can heal: a reset may help, or a restart alone.",
        "restart_heals": "Whether the end of the processes on the device is enough.",
        "reset_failed": "Whether a reset of the device has failed.",
        "counts": "Whether recovery uses up a budget of the policy.",
    },
    HealthEvent: {
        "source": "Kind of the health event.",
        "what": "Code, number, line, condition or reason.",
        "node": "Node rank; -1: the nodes on the host.",
        "device": "Number of the device on its node; -1: none.",
        "within_s": "Seconds until the host ends, for a notice; 0: unknown.",
        "gone": "Whether the event is over.",
        "by": "Who reported it.",
        "severity": "Severity of an Ascend code, by its driver.",
        "origin": "What reported the Ascend code.",
        "host": "Name of the host; empty: unknown.",
        "address": "Address of the pod; empty: unknown.",
        "run": "Restarts of the pod's container.",
        "exit_code": "Exit status of the pod's container.",
    },
    NodeVerdict: {
        "node": "Node rank.",
        "health": "Result.",
        "reason": "Why, in a sentence.",
        "part": "The part of the node that failed or is slow.",
        "over": "Duration as a multiple of that of healthy nodes.",
        "device": "Number of the device on its node; -1: none.",
        "seconds": "Durations in seconds, by part.",
    },
    Finding: {
        "kind": "What is slow.",
        "ranks": "The ranks.",
        "factor": "Duration as a multiple of the earlier one, or of that of other ranks.",
        "since": "Step in which it began.",
        "found": "Step in which it was found.",
        "cost": "Share of the steps' time that it costs, 0 to 1.",
        "group": "Process group of a slow link.",
    },
}


# The sources of a rank's state.
SOURCES = {
    "self": "The rank kept the state in its own memory.",
    "peer": "Another rank sent it.",
    "snapshot": "A snapshot in the memory of the agent of its node.",
    "replica": "A copy of a snapshot, in the memory of the agent of another node.",
    "checkpoint": "A checkpoint in the store.",
    "fresh": "The script built it: nothing was trained before.",
    "script": "The rank has not reached a Session: the script has none and loads its own state, or "
    "the ranks restarted before they reached it. `step` and `newest` are 0.",
}
_SOURCES_TEXT = (
    'The keys of `sources` in `formed`. `{"self": 3, "peer": 1}`: 3 ranks kept their state, and 1 '
    "received it from another rank."
)

_INTRODUCTION = (
    "This page lists the events of a job's journal, with all their fields. `rekindle status JOB`, "
    "`rekindle incidents JOB` and the reports of flows are made from these events: "
    "[the commands](commands.md) show the same facts without a parser."
)

_FACTS = (
    (
        "File",
        "`$REKINDLE_HOME/jobs/JOB/journal.jsonl`; without `REKINDLE_HOME` "
        "`~/.rekindle/jobs/JOB/journal.jsonl` ([job directory](job-directory.md))",
    ),
    (
        "In Kubernetes",
        f"in the coordinator's pod, `{names.POD_HOME}/jobs/JOB/journal.jsonl`. The process that "
        "follows the job (a flow, for example) keeps a copy in its own job directory",
    ),
    ("Format", "one JSON object on each line, appended in order; never rotated or shortened"),
    (
        "Example",
        '`{"type":"first-step","seq":12,"at":1795719648.71,"generation":2,"step":67,"incident":1}`',
    ),
    (
        "Attempts",
        "all attempts of a job are in one file; each begins with `job-started`. `seq` continues",
    ),
    ("Writer", "only the coordinator; a lock on the file keeps a second writer away"),
    (
        "Incomplete last line",
        "a killed writer can leave one. Ignore it; the next coordinator removes it. Any other line "
        "that cannot be decoded is an error",
    ),
    (
        "Full disk",
        "training continues. The coordinator keeps the events in memory until the file takes them, "
        "and writes a message to its standard error",
    ),
    ("Later versions", "ignore fields that you do not know"),
    (
        "Follow it",
        "read the file, or `GET /events?since=SEQ` of the coordinator, with the job's secret in "
        f"`{names.HEADER_SECRET}: Bearer SECRET`. It sends the events after number SEQ, then new "
        "ones as they come, and ends after `ended`. Each second without an event it sends "
        '`{"type":"keepalive"}`. `follow=0` returns only the present events',
    ),
    (
        "Python",
        "`from rekindle.testing import journal`: the events as classes, `journal.read(lines)` and "
        "`journal.incidents(events)`",
    ),
)

_QUESTIONS = (
    ("Is the job over?", "`ended`, with any outcome except `rescheduled`"),
    ("Does training continue after a fault?", "`first-step` with the number of the incident"),
    ("How long did a recovery take?", "`at` of `first-step` minus `at` of the first `fault`"),
    ("How many finished steps were lost?", "`formed`: `newest` - `step`, at least 0"),
    ("Where did the ranks get their state?", "`formed`: `sources`"),
    (
        "Does a strategy wait for a person?",
        "`decided` with `approval: true`, without a later `answered`, `stopping`, `ended`, or "
        "`decided` with `approval: false`",
    ),
    ("Was a checkpoint written?", "`checkpointed`, `checkpoint-failed`, `checkpoint-left-out`"),
    (
        "Did the job reject a checkpoint at its start?",
        "`checkpoint-skipped`, one for each checkpoint",
    ),
    ("Was a host excluded?", "`isolated`"),
    ("Did ranks hold different states?", "`fault` of kind `replicas`, `ranks-differ`"),
    ("Was a step skipped?", "`step-skipped`"),
    ("Was a node lost, and replaced?", "`fault` of kind `node-lost`, `node-wanted`, `node-joined`"),
    ("Which steps and losses?", "not in the journal: `metrics/rank<r>.jsonl`"),
)


def events() -> str:
    """Return the page of journal events.

    Raises ValueError: an event or field has no row here.
    """
    kinds = sorted(get_args(journal.AnyEvent), key=_tag)
    check_names("journal", [_tag(kind) for kind in kinds], EVENTS)
    used = {_known(_tag(kind), name) for kind in kinds for name in kind.__struct_fields__}
    check_names("journal", used, FIELDS)
    parts = [
        _INTRODUCTION,
        table(("Fact", "Value"), _FACTS),
        "## Which event answers a question",
        table(("Question", "Events"), _QUESTIONS),
        "## Fields of every event",
        "`type` has the kind of the event. Rekindle writes every field; only a journal of an "
        "earlier "
        "version may lack a field with a default.",
        _fields(Event, "event", own=("seq", "at")),
    ]
    for kind in kinds:
        own = tuple(name for name in kind.__struct_fields__ if name not in ("seq", "at"))
        parts += [f"## {_tag(kind)}", f"{EVENTS[_tag(kind)]} Class: {code(kind.__name__)}."]
        parts += [_fields(kind, _tag(kind), own)] if own else []
    parts += ["## Values of fields", "### Sources", _SOURCES_TEXT]
    check_names("journal", [source.value for source in StateSource], set(SOURCES) - {"script"})
    rows = [(code(name), meaning) for name, meaning in SOURCES.items()]
    parts += [table(("Source", "Meaning"), rows)]
    for part, meanings in PARTS.items():
        fields = part.__struct_fields__
        check_names("journal", fields, meanings)
        rows = [(*_row(part, name), meanings[name]) for name in fields]
        parts += [f"### {_title(part)}", table(_HEADS, rows)]
    words = codes(Switch.__struct_fields__)
    parts += [f"### Switch\n\nOne `true` or `false` for each kind of records: {words}."]
    return page("Journal events", *parts)


_HEADS = ("Field", "Type", "Default", "Meaning")
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false"}


def _tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


def _title(kind: type) -> str:
    return {Fault: "Fault", HealthEvent: "Health event"}.get(
        kind, "Verdict" if kind is NodeVerdict else kind.__name__
    )


def _known(tag: str, name: str) -> str:
    return f"{tag}.{name}" if f"{tag}.{name}" in FIELDS else name


def _fields(kind: type[msgspec.Struct], tag: str, own: tuple[str, ...]) -> str:
    return table(_HEADS, [(*_row(kind, name), FIELDS[_known(tag, name)]) for name in own])


def _row(kind: type[msgspec.Struct], name: str) -> tuple[str, str, str]:
    field = next(each for each in msgspec.structs.fields(kind) if each.name == name)
    hint = get_type_hints(kind)[name]
    return code(name), _type(hint), _default(field)


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = typing.cast("Any", field.default_factory)()
    if value is msgspec.NODEFAULT:
        return "always there"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool) or value is None:
        return code({True: "true", False: "false", None: "null"}[value])
    return "empty" if value in ("", (), {}) else code(value)


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_type(arguments[0])}"
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if origin is dict:
        return f"{_type(arguments[1])} by name"
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is type(None) else _type(each) for each in arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        numbers = issubclass(hint, int)
        return "integer" if numbers else "one of " + codes(each.value for each in hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "object"
    return _PLAIN[hint]
