"""Faults of each process of a job, in each phase of the job, and the outcome that each one has.

`TABLE` is the only place that states outcomes. `playing` runs a row on a job. `started` and
`flow_job` start jobs, and `script` is what their ranks run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Victim(enum.Enum):
    """The process that gets the signal. Agent, fork server and store are those of node 0."""

    LAUNCHER = "launcher"  # rekindle run
    FLOW = "flow"  # the process of a flow run
    COORDINATOR = "coordinator"
    AGENT = "agent"
    FORK_SERVER = "fork-server"
    RANK = "rank"  # rank 0; in a recovery the new process of rank 1
    STORE = "store"  # the rendezvous store of the ranks
    CONTROL = "control"  # the coordinator and all agents
    ALL = "all"  # every process of the job, with its launcher


class Phase(enum.Enum):
    """The event at which the signal comes."""

    LAUNCH = "launch"  # the victim has just begun
    START = "start"  # the ranks run the script's first lines
    TRAINING = "training"  # all ranks have finished the first step
    RECOVERY = "recovery"  # rank 1 was killed, and its new process runs the script's first lines
    CHECKPOINT = "checkpoint"  # the agent of node 0 waits for the store's lock to write
    END = "end"  # all ranks have left their Session, and still run the script


class Outcome(enum.Enum):
    """What the fault costs. In each case the job ends well, with the digests of any other run."""

    NOTHING = "nothing"  # no process is replaced
    COORDINATOR = "coordinator"  # another coordinator; ranks and agents keep their processes
    RANK = "rank"  # one rank has a new process
    AGENT = "agent"  # the job asks for another agent of node 0; no rank has a new process
    NODE = "node"  # another agent replaces the one of node 0
    RESTART = "restart"  # all ranks have new processes, under the same agents
    REPLACED = "replaced"  # another agent for node 0, and new processes of all ranks
    AGENTS = "agents"  # another coordinator, which asks for all agents; ranks keep their processes
    NODES = "nodes"  # another coordinator, other agents for all nodes, new processes of all ranks
    AGAIN = "again"  # the job ends without success, and its next launch completes it
    ADOPTED = "adopted"  # another process of the flow run steers the same job


SIGNALS = ("stop 5", "stop 30", "stop 70", "kill")  # SIGSTOP, and SIGCONT after these seconds

# The outcome of each signal. `a|b` allows both: two limits or two processes race. `-`: no row.
TABLE = """
victim       phase       stop 5        stop 30       stop 70       kill

launcher     launch      nothing       nothing       nothing       again
launcher     start       nothing       nothing       nothing       again
launcher     training    nothing       nothing       nothing       again
launcher     recovery    nothing       nothing       nothing       again
launcher     checkpoint  nothing       nothing       nothing       again
launcher     end         nothing       nothing       nothing       again

flow         launch      nothing       nothing       nothing       adopted
flow         start       nothing       nothing       nothing       adopted
flow         training    nothing       nothing       nothing       adopted
flow         recovery    nothing       nothing       nothing       adopted
flow         checkpoint  nothing       nothing       nothing       adopted
flow         end         nothing       nothing       nothing       adopted

coordinator  launch      nothing       coordinator   coordinator   coordinator
coordinator  start       nothing       coordinator   coordinator   coordinator
coordinator  training    nothing       coordinator   coordinator   coordinator
coordinator  recovery    nothing       coordinator   coordinator   coordinator
coordinator  checkpoint  nothing       coordinator   coordinator   coordinator
coordinator  end         nothing       coordinator   coordinator   coordinator

agent        launch      nothing       agent         agent         agent
agent        start       nothing|agent|node     node          node          node|replaced
agent        training    nothing|agent|node     node          node          node
agent        recovery    nothing|agent|node     node          node          node
agent        checkpoint  nothing|agent|node     node          node          node
agent        end         nothing|agent|replaced replaced      replaced      replaced

fork-server  launch      nothing       nothing       nothing       nothing
fork-server  start       nothing       nothing       nothing       nothing
fork-server  training    nothing       nothing       nothing       nothing
fork-server  recovery    nothing       nothing       nothing       nothing
fork-server  checkpoint  nothing       nothing       nothing       nothing
fork-server  end         nothing       nothing       nothing       nothing

rank         start       nothing       rank          rank          rank|restart
rank         training    nothing       rank          rank          rank
rank         recovery    nothing       rank          rank          rank
rank         checkpoint  nothing       rank          rank          rank
rank         end         nothing       restart       restart       restart

store        start       nothing       nothing       nothing       nothing
store        training    nothing       nothing       nothing       nothing
store        recovery    nothing       nothing       nothing       nothing
store        checkpoint  nothing       nothing       nothing       nothing
store        end         nothing       nothing       nothing       nothing

control      training    nothing       agents|nodes  nodes         -

all          launch      nothing       nothing       nothing       again
all          start       nothing       nothing       nothing       again
all          training    nothing       nothing       nothing       again
all          recovery    nothing       nothing       nothing       again
all          checkpoint  nothing       nothing       nothing       again
all          end         nothing       nothing       nothing       again
"""


@dataclass(frozen=True)
class Row:
    """One signal to one victim in one phase. seconds: until SIGCONT; 0: the signal is SIGKILL."""

    victim: Victim
    phase: Phase
    seconds: float
    outcomes: frozenset[Outcome]

    def __str__(self) -> str:
        signal = f"stop-{self.seconds:g}" if self.seconds else "kill"
        return f"{self.victim.value}-{self.phase.value}-{signal}"


def rows() -> list[Row]:
    """Return all rows of the table."""
    seconds = [float(signal.removeprefix("stop")) if signal != "kill" else 0 for signal in SIGNALS]
    found = []
    for line in filter(None, TABLE.splitlines()[2:]):
        victim, phase, *outcomes = line.split()
        for each, names in zip(seconds, outcomes, strict=True):
            if names == "-":
                continue
            allowed = frozenset(map(Outcome, names.split("|")))
            found.append(Row(Victim(victim), Phase(phase), each, allowed))
    return found
