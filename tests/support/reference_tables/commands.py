"""The page of all commands and options, from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from reference_tables.markdown import check_names, code, codes, page, sentence, table
from rekindle.cli.main import command_parser

# The unit of a number, by its metavar.
UNITS = {
    "CHECKPOINTS": "checkpoints",
    "DAYS": "days",
    "DEVICE": "device number on the node",
    "DEVICES": "devices",
    "FACTOR": "times",
    "HOURS": "hours",
    "INCIDENT": "incident number",
    "NODE": "node rank",
    "NODES": "nodes",
    "PORT": "TCP port",
    "LINES": "lines",
    "RANK": "rank",
    "RESTART": "number of the restart",
    "RANKS": "ranks",
    "RESTARTS": "restarts",
    "RUNS": "runs",
    "SECONDS": "seconds",
    "SEED": "",
    "STEP": "steps",
    "STEPS": "steps",
}
_DEFAULT = re.compile(r"[;,]? ?\(?\bdefault: ([^;)]*)\)?")
IGNORED = "accepted for compatibility with torchrun, without effect"

_LISTED = "`--json` prints the incidents as a JSON list, with all faults and times."
_CLUSTER = (
    "Without `--kubeconfig`, `--context` and `--namespace` the command concerns the simulated "
    "hosts of this machine and user, by the log in `REKINDLE_HOME`. Each of the three options "
    "alone selects the jobs of a cluster; the other two then have the defaults of the table."
)
_RUNNING = (
    "Run the command on the machine of the job directory, with the same `REKINDLE_HOME` as "
    "`rekindle run`, as a user who can read the job's secret."
)
_PUBLISHED = (
    "[Checkpoints](../recover/checkpoints.md) has examples, the states, and the failure cases."
)

# Facts that the options do not show: their interaction, the output, failure cases and links.
NOTES: dict[str, list[str]] = {
    "rekindle run": [
        "Without an address of another machine and without `--node-rank` the command starts all "
        "nodes of the job on this machine, each simulated by an agent of its own. With "
        "`--nnodes MIN:MAX` the job has MAX nodes. It may start with fewer nodes after 20 s, and "
        "continue with as few as MIN.",
        "A job of several machines: torchrun's command on each machine, with `--rdzv-endpoint`, or "
        "with `--master-addr` and `--node-rank`. The machine of the address hosts the coordinator "
        "([the rules](../operate/running.md#several-machines-without-kubernetes)). Without "
        "`REKINDLE_SECRET` whoever reaches the port can join:",
        "```text\nREKINDLE_SECRET=$(cat secret) rekindle run --nnodes 2 --rdzv-endpoint "
        "10.0.0.1:29400 train.py\n```",
        "Or `--node-rank 0` and `--listen` with an address of the network on the first machine. "
        "Each other machine runs the command that this one prints, with `--coordinator` and "
        "`REKINDLE_SECRET`. `--node-rank` names its node there, and `--spare` makes it a spare. "
        "Without both it takes any free place.",
        "A variable `PET_NAME` is an option `--name` of torchrun that the command line lacks.",
        "`--nproc-per-node`: `gpu` is the number of CUDA devices, and an error without any. `cpu` "
        "is the number of CPU cores. `auto` is `gpu`, or `cpu` without a CUDA device.",
        "Without `-r` and `-t` both streams of each rank go to its log files and to the terminal, "
        "where each line begins with role and rank, such as `[default0]:`, or with `--log-format "
        "json` is an object ([Log lines](../operate/running.md#log-lines)). Only `-r` hides a "
        "stream from the terminal; `-t` shows it in spite of `-r`.",
        "The first Ctrl-C stops the job: the ranks get SIGTERM, and SIGKILL after 10 s. Then the "
        "agents write the newest snapshot as a final checkpoint, if the policy has `dump` (the "
        "default) and no checkpoint is as new. The second Ctrl-C kills all ranks without a final "
        "checkpoint. [Run a job from the shell](../operate/running.md) explains all options.",
    ],
    "rekindle adapt": [
        "The diff goes to standard output, and the reports go to standard error. Status 0: the "
        "diff is complete; 1: a report asks a person for more; 2: FILE is missing, no Python, or "
        "has no training loop. The command needs the extra `adapt`. "
        "[Adapt a script](../train/adapt.md) explains the reports.",
    ],
    "rekindle inject": [
        "The job must have been started with `--allow-injection`, and the script needs a Session. "
        "Example: `rekindle inject demo --rank 2 --kind kill --step 30`. Without `--step` the rank "
        "must be in a step. A step that the rank has finished is refused. "
        "[Cause a fault](../operate/running.md#cause-a-fault) describes each kind.",
    ],
    "rekindle policy": [
        "A valid policy is printed with all settings as YAML. ModelArts needs `max_reschedules` "
        "above 0 and a `reschedule-job` strategy. "
        "[Recovery policy](../recover/policy.md#policies-of-modelarts-and-mindcluster) has the "
        "labels and annotations.",
    ],
    "rekindle simulate": [
        "`--runs` is at least 5. [Simulate](../operate/simulate.md) explains the output.",
    ],
    "rekindle checkpoints ls": [_PUBLISHED],
    "rekindle checkpoints verify": ["An unfinished checkpoint does not change the exit status."],
    "rekindle checkpoints pull": [],
    "rekindle checkpoints push": [],
    "rekindle checkpoints prune": [
        "The command keeps the newest N valid checkpoints (N: 1 or more) and all newer ones, each "
        "pinned one, and each one that a process reads.",
    ],
    "rekindle checkpoints pin": [
        "`--hours` is above 0 and at most 87840. A pin also protects against the `--keep-...` "
        "options of a job.",
    ],
    "rekindle checkpoints unpin": [],
    "rekindle checkpoints export": ["OUT must not exist. Only PyTorch's checkpoints are exported."],
    "rekindle checkpoints import": [
        "A source without a number of steps needs `--step`; otherwise the status is 2. A "
        "checkpoint that the store has already is never replaced: "
        "[import](../recover/checkpoints.md#import).",
    ],
    "rekindle kubernetes render": [
        "The output is YAML for `kubectl`. The values of Secrets are hidden, and nothing is "
        "applied.",
    ],
    "rekindle kubernetes check": [
        "The command creates nothing in the cluster. [Kubernetes](../deploy/kubernetes.md) "
        "describes the requirements.",
    ],
    "rekindle kubernetes trace": [
        "Without `--on` and `--off` it prints the kinds that are on. With `--follow` it then "
        "prints a line for each change."
    ],
    "rekindle kubernetes signals": [
        "Each line is one answer of ClusterD, as JSON. `faults` has the present faults of the "
        "job's nodes, and with `--follow` each change. `recovery` has each order to the starter "
        "of the job's processes."
    ],
    "rekindle diagnose": ["[Profiling](../operate/profiling.md) explains the output."],
    "rekindle npu-check": ["Each line has a requirement, its state, and the finding."],
    "rekindle status": [
        "For a running job the output has the state, the attempt, the step, the generation, and "
        "for each rank its node, process id, finished steps and status. For an ended job it has "
        "the outcome and its reason. A strategy that waits for approval is printed, too. "
        f"{_RUNNING} [States](states.md) lists all states.",
    ],
    "rekindle jobs": [
        "The command asks the coordinator of each job that has not ended for its state. The state "
        "is `died` if none answers within 2 s, and `damaged` if the first line of its journal is "
        "not an event. `--json` prints a list with the fields `job_id`, "
        "`state`, `finished` (steps; -1: not known), `began`, `ended` (seconds since the epoch; "
        "0: not yet), `reason` and `directory`.",
    ],
    "rekindle logs": [
        "The command reads the files of the job's ranks on this machine. With several ranks each "
        "line begins with `[rank R]`. `--follow` also prints the output after a restart, and ends "
        "with the job.",
    ],
    "rekindle report": [
        "The report is that of the flow, as Markdown, without the picture. It is printed for each "
        "job, also for one without a flow, and while the job runs.",
    ],
    "rekindle completion": [
        "For bash add this line to `~/.bashrc`:",
        '```text\neval "$(rekindle completion bash)"\n```',
    ],
    "rekindle incidents": [
        "Each row is one incident, and the lines below the table have the reasons of the "
        "decisions.",
        table(
            ("Column", "Content"),
            [
                ("`#`", "The number of the incident."),
                ("`detected`", "When the first fault was detected, in local time."),
                ("`fault`", "The kind of the most likely cause."),
                ("`where`", "The rank or node of that fault."),
                ("`strategy`", "The strategies that Rekindle used, in order, with `>` between."),
                (
                    "`took`",
                    "Milliseconds from the detection to the first step that all ranks finished "
                    "afterwards. Without a Session: to the start of the new processes. `open`: "
                    "training has not continued.",
                ),
                (
                    "`steps lost`",
                    "Finished steps that the ranks had to repeat. `unknown`: training has not "
                    "continued, or ranks without a Session restarted: then only the script knows "
                    "its steps.",
                ),
            ],
        ),
        _LISTED,
    ],
    "rekindle approve": [
        "`rekindle status JOB` prints the strategy that waits. If nothing waits, the status is 1.",
    ],
    "rekindle report-fault": [
        "Example: `rekindle report-fault JOB --node 0 --device 3 --source xid 79`. "
        "[Report a fault to a job](../recover/policy.md#report-a-fault-to-a-job) describes the "
        "answers.",
    ],
    "rekindle drain": [
        "Example: `rekindle drain JOB --node 1 --deadline 300`. The command returns when the move "
        "is planned; `rekindle status JOB` shows it until it is over. "
        "[Move a node](../operate/operations.md#move-a-node) describes what happens.",
    ],
    "rekindle profile": [
        "`on` without `--kinds` records step, save-checkpoint, forward and data-loader. It does "
        "not record communication, because that slows training down: name it with `--kinds`. Any "
        "kind switches these four on together. `off` without `--kinds` stops all records.",
    ],
    "rekindle stop": [
        "The ranks get SIGTERM, and SIGKILL after 10 s. Then the agents write the newest snapshot "
        "as a final checkpoint, if the policy has `dump` (the default) and no checkpoint is as "
        f"new. The command does not wait for the end. {_RUNNING}",
    ],
    "rekindle setup": [
        "The output has one line for each object. [Deployments](../deploy/deploying.md) has the "
        "objects, the words of the lines, and the form of the file.",
    ],
    "rekindle nodes": [
        "The output has one row for each host: its state (`in use`, `lemon`, `isolated`), its "
        "number of faults, the job that isolated it, and its last node check. " + _CLUSTER,
    ],
    "rekindle release-node": ["Rekindle also forgets the earlier faults of the node. " + _CLUSTER],
}


def parsers(
    parser: argparse.ArgumentParser, name: str = "rekindle"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of each command without subcommands."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for word, each in action.choices.items():
            yield from parsers(each, f"{name} {word}")


def commands() -> str:
    """Return the page of all commands and options."""
    found = dict(parsers(command_parser()))
    check_names("commands", found, NOTES)
    parts = [
        "This page lists every command of `rekindle`, its arguments and options, with type, unit "
        "and default, and the output of the commands for jobs. "
        "[Exit statuses](exit-statuses.md) and [environment variables](environment.md) are on "
        "pages of their own. [Run a job from the shell](../operate/running.md) shows how to use "
        "the commands.",
        "Each command prints its options with `--help`; `rekindle --version` prints the version. "
        "An option of `rekindle run` may have dashes or underscores (`--max-restarts`, "
        "`--max_restarts`).",
        "The column Unit has the unit of a number. The default *none* means that the option is "
        "not set; *off* means that the flag is not set.",
    ]
    for name, parser in found.items():
        parts += [
            f"## {name}",
            f"{sentence(parser.description or '')} Usage: {code(_usage(parser))}",
        ]
        rows = [_row(action) for action in _shown(parser)]
        if rows:
            heads = ("Argument or option", "Type", "Unit", "Default", "Meaning")
            parts += [table(heads, rows)]
        ignored = _groups(parser, IGNORED)
        if ignored:
            options = codes(each.option_strings[0] for each in ignored)
            parts += [f"Options of torchrun that the command accepts and ignores: {options}."]
        parts += NOTES[name]
    return page("Commands and options", *parts)


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [parser.prog]
    words += ["[options]"] if any(each.option_strings for each in _shown(parser)) else []
    for action in parser._actions:
        if action.required and action.option_strings:
            words.append(f"{action.option_strings[0]} {_value(action)}")
    words += [
        {
            "?": f"[{_value(a)}]",
            "*": f"[{_value(a)} ...]",
            argparse.REMAINDER: "[ARGUMENT ...]",
        }.get(a.nargs, _value(a))
        for a in parser._actions
        if not a.option_strings
    ]
    return " ".join(words)


def _groups(parser: argparse.ArgumentParser, title: str) -> list[argparse.Action]:
    return [
        action
        for group in parser._action_groups
        if group.title == title
        for action in group._group_actions
    ]


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = _groups(parser, IGNORED)
    return [
        each
        for each in parser._actions
        if each not in hidden and not isinstance(each, argparse._HelpAction)
    ]


def _row(action: argparse.Action) -> tuple[str, ...]:
    text = action.help or ""
    found = _DEFAULT.search(text)
    meaning = _DEFAULT.sub("", text).strip() if found else text
    return (_name(action), _type(action), unit(action), _default(action, found), sentence(meaning))


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return code(_value(action))
    # The column omits spellings with underscores; the page describes them in a sentence.
    dashed = [each for each in action.option_strings if "_" not in each]
    return codes(dashed)


def _value(action: argparse.Action) -> str:
    if action.metavar:
        return str(action.metavar)
    if action.choices:
        return "|".join(map(str, action.choices))
    return action.dest.upper()


def _type(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "flag"
    if action.choices:
        return "one of " + codes(action.choices)
    kind = {int: "integer", float: "number"}.get(action.type, "text")
    several = isinstance(action, argparse._AppendAction) or action.nargs in ("*", "...")
    value = f" {code(_value(action))}" if action.option_strings else ""
    return f"{kind}{value}{', several' if several else ''}"


def unit(action: argparse.Action) -> str:
    """Return the unit of a number.

    Raises ValueError: its metavar does not have a unit.
    """
    if action.type not in (int, float):
        return UNITS[str(action.metavar)] if action.metavar in ("STEPS", "NODES", "RANKS") else ""
    if str(action.metavar) not in UNITS:
        names = "/".join(action.option_strings) or action.dest
        raise ValueError(
            f"{names}: its metavar is {action.metavar}, and no unit of {sorted(UNITS)}"
        )
    return UNITS[str(action.metavar)]


def _default(action: argparse.Action, match: re.Match[str] | None) -> str:
    if action.required and action.option_strings:
        return "required"
    if not action.option_strings and action.nargs not in ("?", "*", argparse.REMAINDER):
        return "required"
    if match:
        text = match[1].strip()
        return code(text) if text in (str(action.default), "default") else text
    if action.nargs == 0:
        return "off"
    if action.default in (None, "", [], argparse.SUPPRESS):
        return "none"
    return code(action.default)
