"""Define every name that crosses a process boundary: variables, files, wire constants.

A change of one of them is a change of the wire contract.
"""

from collections.abc import Mapping

VERSION = "0.1.0"  # of Rekindle; checkpoints, reports and `rekindle --version` have it

# The agent sets these for each rank, in addition to torchrun's own variables.
ENV_JOB_ID = "REKINDLE_JOB_ID"
ENV_AGENT = "REKINDLE_AGENT"  # identifies the agent; the processes that ranks start inherit it
ENV_NODE_RANK = "REKINDLE_NODE_RANK"
ENV_SCHEDULE_COUNT = "MA_SCHEDULE_CNT"  # ModelArts: how many times it placed the node's pod
ENV_START_COUNT = "MA_PROC_START_CNT"  # ModelArts: how many times the script started in this pod
ENV_FIRST_START = "REKINDLE_FIRST_START"  # "1": no process of this rank has run in the job before
ENV_SLOT = "REKINDLE_SLOT"  # number of the rank in the full world; RANK counts only present ranks
ENV_FULL_WORLD = "REKINDLE_FULL_WORLD"  # number of ranks in the full world
ENV_SHRINKS = "REKINDLE_SHRINKS"  # "1": the world may have fewer nodes than the job describes
ENV_JOINS = "REKINDLE_JOINS"  # "1": this rank joins ranks that continue in their processes
ENV_CHANNEL_FD = "REKINDLE_CHANNEL_FD"  # unix socket to the agent (SOCK_SEQPACKET)
ENV_HEARTBEAT_FD = "REKINDLE_HEARTBEAT_FD"  # the rank's heartbeat page (memfd)
ENV_STACK_FILE = "REKINDLE_STACK_FILE"  # file for the rank's stacks, which it writes on request
ENV_PROFILING = "REKINDLE_PROFILING"  # folder of all records of light profiling
ENV_METRICS_FILE = "REKINDLE_METRICS_FILE"  # file for the rank's step records
ENV_SNAPSHOT_EVERY = "REKINDLE_SNAPSHOT_EVERY"  # steps between snapshots; 0 = never
ENV_CHECKPOINT_STORE = "REKINDLE_CHECKPOINT_STORE"  # location of the store

# ModelArts, set by the user: seconds that a reschedule may wait for old pods after their grace.
ENV_FAILOVER_GRACE = "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS"

# The command line and the engine read these.
ENV_HOME = "REKINDLE_HOME"  # folder of job directories; default ~/.rekindle
ENV_DOCUMENTATION = "REKINDLE_DOCUMENTATION"  # address of the site that `make docs` builds
ENV_LOG_FORMAT = "REKINDLE_LOG_FORMAT"  # form of lines (console.py); a process sets its children's
ENV_METRICS_LISTEN = "REKINDLE_METRICS_LISTEN"  # address of the coordinator's metrics
ENV_SECRET = "REKINDLE_SECRET"  # the job's secret; an agent takes it before the job directory's

# The secret of a job of torchrun's command line without REKINDLE_SECRET. It keeps nobody out.
NO_SECRET = "this-job-has-no-secret"

# The containers of a job's pods have these.
ENV_POD_IP = "REKINDLE_POD_IP"
ENV_HOST_NAME = "REKINDLE_HOST_NAME"  # the agent's name for its host; default: the hostname

# Limits on the records of light profiling, in agents and ranks; docs/operate/profiling.md.
ENV_PROFILING_CAP_MB = "REKINDLE_PROFILING_CAP_MB"  # size of all records
ENV_PROFILING_FILE_MB = "REKINDLE_PROFILING_FILE_MB"  # size of one file
ENV_PROFILING_FLUSH_S = "REKINDLE_PROFILING_FLUSH_S"  # seconds between two writes of a rank
PROFILING_SETTINGS = (ENV_PROFILING_CAP_MB, ENV_PROFILING_FILE_MB, ENV_PROFILING_FLUSH_S)

# Credentials of a store in S3. Without them boto3 finds credentials.
ENV_STORE_ACCESS_KEY_ID = "REKINDLE_STORE_ACCESS_KEY_ID"
ENV_STORE_SECRET_ACCESS_KEY = "REKINDLE_STORE_SECRET_ACCESS_KEY"
ENV_STORE_SESSION_TOKEN = "REKINDLE_STORE_SESSION_TOKEN"  # only for temporary credentials
STORE_KEYS = (ENV_STORE_ACCESS_KEY_ID, ENV_STORE_SECRET_ACCESS_KEY, ENV_STORE_SESSION_TOKEN)

OUR_THREADS = "rekindle-"  # begins the name of each thread of Rekindle

# Files of a job directory.
SPEC_FILE = "job.json"
SECRET_FILE = "secret"
MONITOR_FILE = "monitor-token"  # a token that permits only PATH_HEALTH_EVENTS, on loopback
PODS_FILE = "pods.json"
CLUSTER_FILE = "cluster"
JOURNAL_FILE = "journal.jsonl"
ENDPOINT_FILE = "coordinator.json"
BUG_FILE = "-bug-"  # in the name of a report of a bug: PROCESS-bug-N.json
LAUNCH_LOCK_FILE = "launch.lock"
CALLERS_FILE = "callers"  # the flow runs that launched the job, and the calls that got its result
DEVICES_FILE = "devices"  # names of the devices that the job holds, one a line
NOTICES_FILE = "prefect-notices"  # the number of the last event that Prefect has
LOGS_DIRECTORY = "logs"
ERROR_FILE = "error.json"  # the error of a rank, next to its output, in torchrun's form
TEXT_OF_SCRIPT = "textOfScript"  # a key of that file, which torchrun does not have
STACK_FILE = "stacks.log"  # the stacks of a rank, written on request
METRICS_DIRECTORY = "metrics"
PROFILING_DIRECTORY = "profiling"  # records of light profiling
NODES_DIRECTORY = "nodes"  # directories of nodes that joined, each named by its hostname
CHECKPOINT_DIRECTORY = "checkpoints"
REPORT_FILE = "report.md"
TIMELINE_FILE = "timeline.png"
PREPARED_FILE = "prepared"  # the retrain flow has prepared the data
PREPARE_LOCK_FILE = "prepare.lock"
EVALUATE_LOCK_FILE = "evaluate.lock"
BROUGHT_DIRECTORY = "brought"  # a checkpoint that the retrain flow copied from an object store

# Files of the home directory, which all jobs share.
HOSTS_FILE = "hosts.jsonl"  # events on hosts
HOSTS_DIRECTORY = "hosts"  # files of the simulated hosts
DEVICES_DIRECTORY = "devices"  # files of the devices that jobs hold
CONDITION_SUFFIX = ".condition"  # file next to a simulated host's file: its faults

# In the coordinator's container of a job in pods.
POD_HOME = "/var/lib/rekindle"  # its REKINDLE_HOME
POD_DESCRIBED = "/etc/rekindle/job"  # folder with SPEC_FILE and SECRET_FILE
POD_PORT = 29600

# HTTP paths of the coordinator. All clients except agents send the job's secret in HEADER_SECRET,
# because Kubernetes' API server does not pass on an Authorization header.
HEADER_SECRET = "X-Rekindle-Authorization"
HEADER_WIRE = "X-Rekindle-Wire"  # the sender's WIRE_VERSION
PATH_AGENT = "/agent"
PATH_SPEC = "/spec"
PATH_JOB = "/job"
PATH_EVENTS = "/events"
PATH_STEER = "/steer"
PATH_LEASE = "/lease"  # the holder of the lease renews it
PATH_INJECT = "/inject"
PATH_PROFILE = "/profile"
PATH_APPROVE = "/approve"
PATH_STOP = "/stop"
PATH_DRAIN = "/drain"
PATH_HEALTH_EVENTS = "/health-events"
PATH_ATTEMPT = "/attempt"  # for a coordinator in a pod, between attempts

# The automation that runs the rescue flow runs it again if Prefect does not see this event.
EVENT_RESCUE_DONE = "rekindle.rescue.done"

# The coordinator answers the ping of an agent with this while it ends the job.
ENDING = b"ending"
WIRE_VERSION = 18
OFFERS = 32  # checkpoints that a node offers, newest first; a restore tries no older ones
KILLED_S = 30.0  # seconds that a process may live after SIGKILL; the kernel can block it forever
SPARE = -1  # node rank of a spare: an agent that waits to replace a lost node
LOOPBACK = "127.0.0.1"
RANK_MARKS = (ENV_AGENT, ENV_SLOT, ENV_START_COUNT)  # identify one process of a rank


def temporary_folder(environment: Mapping[str, str]) -> str:
    """Return the name of the folder of a rank's multiprocessing, from the rank's environment."""
    marks = (environment[name] for name in RANK_MARKS)
    return "-".join(("pymp", *marks))
