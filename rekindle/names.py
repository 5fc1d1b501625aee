"""Every name that crosses a process boundary: environment variables, files, wire constants.

Changing one of them is a change of the wire contract.
"""

# Set by the agent for each rank, besides torchrun's own variables.
ENV_JOB_ID = "REKINDLE_JOB_ID"
ENV_NODE_RANK = "REKINDLE_NODE_RANK"
ENV_SCHEDULE_COUNT = "MA_SCHEDULE_CNT"  # ModelArts: how often the node's pod was placed
ENV_START_COUNT = "MA_PROC_START_CNT"  # ModelArts: how often the script was started in this pod
ENV_SLOT = "REKINDLE_SLOT"  # the rank's number in the full world; RANK counts those that are there
ENV_FULL_WORLD = "REKINDLE_FULL_WORLD"  # ranks of the full world
ENV_JOINS = "REKINDLE_JOINS"  # "1": other ranks go on in their processes, and this one joins them
ENV_CHANNEL_FD = "REKINDLE_CHANNEL_FD"  # unix socket to the agent (SOCK_SEQPACKET)
ENV_HEARTBEAT_FD = "REKINDLE_HEARTBEAT_FD"  # the rank's heartbeat page (memfd)
ENV_STACK_FILE = "REKINDLE_STACK_FILE"  # where the rank writes its stacks when it is asked to
ENV_PROFILING = "REKINDLE_PROFILING"  # the folder of all records of light profiling
ENV_METRICS_FILE = "REKINDLE_METRICS_FILE"  # where the rank appends its step records
ENV_SNAPSHOT_EVERY = "REKINDLE_SNAPSHOT_EVERY"  # steps between snapshots; 0 = never
ENV_CHECKPOINT_STORE = "REKINDLE_CHECKPOINT_STORE"  # its location

# ModelArts, set by the user: seconds that the end of the old placement may hold up a reschedule.
ENV_FAILOVER_GRACE = "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS"

# Read by the command line and the engine.
ENV_HOME = "REKINDLE_HOME"  # where job directories live; default ~/.rekindle
ENV_SECRET = "REKINDLE_SECRET"  # the job's secret, when it cannot be read from the job directory

# Set in the containers of a job's pods.
ENV_POD_IP = "REKINDLE_POD_IP"
ENV_HOST_NAME = "REKINDLE_HOST_NAME"  # what the agent calls its host; without it: the hostname

# How much light profiling writes down, in agents and ranks; docs/operate/profiling.md.
ENV_PROFILING_CAP_MB = "REKINDLE_PROFILING_CAP_MB"  # of all records
ENV_PROFILING_FILE_MB = "REKINDLE_PROFILING_FILE_MB"  # of one file
ENV_PROFILING_FLUSH_S = "REKINDLE_PROFILING_FLUSH_S"  # between two times that a rank writes

# Credentials of a store in S3; without them those that boto3 finds are taken.
ENV_STORE_ACCESS_KEY_ID = "REKINDLE_STORE_ACCESS_KEY_ID"
ENV_STORE_SECRET_ACCESS_KEY = "REKINDLE_STORE_SECRET_ACCESS_KEY"
ENV_STORE_SESSION_TOKEN = "REKINDLE_STORE_SESSION_TOKEN"  # of temporary ones only

# Files of a job directory.
SPEC_FILE = "job.json"
SECRET_FILE = "secret"
PODS_FILE = "pods.json"
CLUSTER_FILE = "cluster"
JOURNAL_FILE = "journal.jsonl"
ENDPOINT_FILE = "coordinator.json"
LAUNCH_LOCK_FILE = "launch.lock"
LOGS_DIRECTORY = "logs"
ERROR_FILE = "error.json"  # of a rank, beside its output, as torchrun has it
STACK_FILE = "stacks.log"  # of a rank: where it was when it was asked
METRICS_DIRECTORY = "metrics"
PROFILING_DIRECTORY = "profiling"  # records of light profiling
NODES_DIRECTORY = "nodes"  # of nodes that joined, each by its hostname
CHECKPOINT_DIRECTORY = "checkpoints"

# Files of the home directory, which all jobs share.
HOSTS_FILE = "hosts.jsonl"  # what happened on hosts
HOSTS_DIRECTORY = "hosts"  # the simulated ones
CONDITION_SUFFIX = ".condition"  # beside a simulated host's file: what is wrong with it

# In the coordinator's container of a job in pods.
POD_HOME = "/var/lib/rekindle"  # its REKINDLE_HOME
POD_DESCRIBED = "/etc/rekindle/job"  # a folder with SPEC_FILE and SECRET_FILE
POD_PORT = 29600

# HTTP paths of the coordinator, and where the job's secret is said again: Kubernetes' API server
# keeps an Authorization header to itself when it passes a request on.
HEADER_SECRET = "X-Rekindle-Authorization"
HEADER_WIRE = "X-Rekindle-Wire"  # the WIRE_VERSION of whoever sends it
PATH_AGENT = "/agent"
PATH_SPEC = "/spec"
PATH_JOB = "/job"
PATH_EVENTS = "/events"
PATH_STEER = "/steer"
PATH_INJECT = "/inject"
PATH_PROFILE = "/profile"
PATH_APPROVE = "/approve"
PATH_STOP = "/stop"
PATH_SIGNS = "/signs"
PATH_ATTEMPT = "/attempt"  # of a coordinator in a pod, between attempts

WIRE_VERSION = 9
OFFERS = 32  # checkpoints, newest first, that a node offers; a restore tries no older ones
KILLED_S = 30.0  # how long after SIGKILL a process may live; the kernel can hold one for ever
SPARE = -1  # in the place of a node rank: an agent that waits to take a lost one's place
LOOPBACK = "127.0.0.1"
