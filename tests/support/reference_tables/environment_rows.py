"""The rows of the page of environment variables, by the section of the page."""

from __future__ import annotations

from reference_tables.markdown import code, codes
from rekindle.agent.rendezvous_process import PATIENCE_S
from rekindle.engines.kubernetes.manifests.ascend import TTP_PORT
from rekindle.profiling.switch import MEBIBYTE, RecordLimits
from rekindle.recovery.policy.policy import INNER

_LIMITS = RecordLimits()
_INNER = codes(strategy.value for strategy in INNER)
Row = tuple[str, str, str, str, str]

# (set by, read by, unit, default, meaning)
_USER: dict[str, Row] = {
    "REKINDLE_HOME": (
        "user, pod (`kubernetes.home`)",
        "commands, flows",
        "",
        "`~/.rekindle`",
        "Folder of job directories (`jobs/JOB`) and of the log of hosts. Without it a node of "
        "`rekindle run --coordinator` uses a temporary folder, and removes it at its end.",
    ),
    "REKINDLE_SECRET": (
        "user, pod",
        "`rekindle run` with several machines",
        "",
        "none",
        "The job's secret, the same on all machines. With `--coordinator` the command ends with "
        "status 2 without it. With `--rdzv-endpoint` or `--master-addr` each process that reaches "
        "the coordinator can join a job without it. In an agent it has priority over the file "
        "`secret`. Ranks do not get it.",
    ),
    "REKINDLE_LOG_FORMAT": (
        "user, processes of a job",
        "`rekindle run`, coordinators, agents, ranks",
        "",
        "`auto`",
        "Form of the lines: `auto`, `short`, `long` or `json`. `--log-format` of `rekindle run` "
        "precedes it. Each process sets it for the processes that it starts. "
        "[Log lines](../operate/running.md#log-lines) describes the forms.",
    ),
    "REKINDLE_DOCUMENTATION": (
        "user",
        "Prefect server, `rekindle setup`, flow runs",
        "",
        "none",
        "Address of the site that `make docs` builds, such as `https://docs.example.com/rekindle`. "
        "The block types then have a logo, and a link to their documentation.",
    ),
    "REKINDLE_METRICS_LISTEN": (
        "user",
        "coordinators",
        "",
        "none",
        "Address of the job's metrics for Prometheus: `HOST:PORT`, or `PORT` on `127.0.0.1`. With "
        "port 0 the coordinator takes any free port, and a line of its log names it. Without the "
        "variable there is no listener. [Metrics](../operate/operations.md#metrics) lists them.",
    ),
    "REKINDLE_STORE_ACCESS_KEY_ID": (
        "user, block",
        "agents, ranks, commands",
        "",
        "boto3's search",
        "Access key of a checkpoint store in S3.",
    ),
    "REKINDLE_STORE_SECRET_ACCESS_KEY": (
        "user, block",
        "agents, ranks, commands",
        "",
        "boto3's search",
        "Secret of the access key.",
    ),
    "REKINDLE_STORE_SESSION_TOKEN": (
        "user, block",
        "agents, ranks, commands",
        "",
        "none",
        "Token of a temporary access key.",
    ),
    "REKINDLE_PROFILING_CAP_MB": (
        "user",
        "agents",
        "MiB",
        code(_LIMITS.cap_bytes // MEBIBYTE),
        "Size of all records of light profiling; above it the agent removes the oldest files. "
        "Above 0, at most 1e9.",
    ),
    "REKINDLE_PROFILING_FILE_MB": (
        "user",
        "ranks",
        "MiB",
        code(_LIMITS.file_bytes // MEBIBYTE),
        "Size of one file of records; above it the rank begins another file. Above 0, at most 1e9.",
    ),
    "REKINDLE_PROFILING_FLUSH_S": (
        "user",
        "ranks",
        "seconds",
        f"`{_LIMITS.flush_s:g}`",
        "Time between two writes of records. A killed rank loses the records of this time. Above "
        "0, at most 3600.",
    ),
    "MA_FAILOVER_TERMINATION_GRACE_PERIOD_SECONDS": (
        "user (ModelArts)",
        "flows with Kubernetes, from the job's `environment`",
        "seconds",
        "`-1`: 10 s",
        "Wait for an old pod after its grace period; then it is removed by force. A whole number "
        "of 1 or more, or -1.",
    ),
    "KUBECONFIG": (
        "user",
        "commands and flows with Kubernetes",
        "",
        "`~/.kube/config`, else the service account of the pod",
        "File with the access to a cluster; the Kubernetes client reads it.",
    ),
    "GLOO_SOCKET_IFNAME": (
        "user, agent",
        "gloo",
        "network interface",
        "that of the machine's address, with several machines",
        "Interface at which gloo reaches the ranks of other machines. The agent sets it only if it "
        "is not set.",
    ),
    "OMP_NUM_THREADS": (
        "user, agent",
        "torch, NumPy",
        "threads",
        "`1` with several ranks on a machine",
        "Threads of each rank. The agent sets it only if it is not set.",
    ),
    "CUDA_VISIBLE_DEVICES": (
        "user, platform",
        "agents",
        "",
        "none",
        "Maps the device number of a rank to that of the machine, before a reset of the device.",
    ),
    "ASCEND_RT_VISIBLE_DEVICES": (
        "user, platform",
        "agents",
        "",
        "none",
        "The same, on a machine with Ascend NPUs.",
    ),
    "ASCEND_HOME_PATH": (
        "CANN's `set_env.sh`",
        "`rekindle npu-check`",
        "",
        "none",
        "Folder of CANN, for its version.",
    ),
    "ASCEND_TOOLKIT_HOME": (
        "CANN's `set_env.sh`",
        "`rekindle npu-check`",
        "",
        "none",
        "The same, of another version of CANN.",
    ),
    "MINDIO_FOR_MINDSPORE": (
        "user",
        "ranks with MindIO's API",
        "",
        "none",
        "`1` or `true`: the framework of the ranks is MindSpore, and scripts find MindIO's names.",
    ),
    "MS_TFT_IP": (
        "`train.TFTRegister`",
        "MindSpore",
        "",
        "",
        "Address of MindIO's controller, as the script gives it.",
    ),
    "MS_TFT_PORT": (
        "`train.TFTRegister`",
        "MindSpore",
        "",
        "",
        "Port of MindIO's controller, as the script gives it.",
    ),
}

_RANK: dict[str, Row] = {
    "RANK": ("agent", "script", "rank", "", "Rank in the world of this generation."),
    "LOCAL_RANK": ("agent", "script", "rank", "", "Rank on the node."),
    "WORLD_SIZE": ("agent", "script", "ranks", "", "Ranks in the world of this generation."),
    "LOCAL_WORLD_SIZE": ("agent", "script", "ranks", "", "Ranks of the node."),
    "GROUP_RANK": ("agent", "script", "node rank", "", "Node rank in the world of the generation."),
    "GROUP_WORLD_SIZE": ("agent", "script", "nodes", "", "Nodes in the world of the generation."),
    "ROLE_NAME": ("agent", "script", "", "`default`", "Value of `--role`."),
    "ROLE_RANK": ("agent", "script", "rank", "", "The same as `RANK`."),
    "ROLE_WORLD_SIZE": ("agent", "script", "ranks", "", "The same as `WORLD_SIZE`."),
    "MASTER_ADDR": ("agent", "script", "", "", "Address of the ranks' store."),
    "MASTER_PORT": ("agent", "script", "TCP port", "", "Port of the ranks' store."),
    "TORCHELASTIC_RESTART_COUNT": ("agent", "script", "restarts", "", "Restarts of all ranks."),
    "TORCHELASTIC_MAX_RESTARTS": ("agent", "script", "restarts", "", "`max_restarts`."),
    "TORCHELASTIC_RUN_ID": ("agent", "script", "", "", "The job's id."),
    "TORCHELASTIC_USE_AGENT_STORE": (
        "agent",
        "torch",
        "",
        "",
        "`True`: all ranks are clients of the store. `False` with `--no-python`.",
    ),
    "TORCHELASTIC_ERROR_FILE": (
        "agent",
        "ranks",
        "",
        "",
        "File for the exception that ends the rank, in the format of torchrun.",
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        "agent, Session",
        "torch",
        "",
        "`1`; `2` in a Session",
        "How NCCL handles a failed collective; in a Session it does not end the process.",
    ),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": (
        "Session",
        "torch",
        "",
        "`0`, unless you set it",
        "Whether NCCL's watchdog ends the process after a kernel's error; in a Session the script "
        "raises the error.",
    ),
    "REKINDLE_JOB_ID": ("agent", "ranks", "", "", "The job's id."),
    "REKINDLE_AGENT": (
        "agent",
        "agents",
        "",
        "",
        "Identifies the agent. Processes that ranks start inherit it, and end with their rank.",
    ),
    "REKINDLE_NODE_RANK": ("agent", "ranks", "node rank", "", "Node rank in the full world."),
    "REKINDLE_SLOT": ("agent", "ranks", "rank", "", "Rank in the full world; it never changes."),
    "REKINDLE_FULL_WORLD": ("agent", "ranks", "ranks", "", "Ranks of the full world."),
    "REKINDLE_SHRINKS": (
        "agent",
        "ranks",
        "",
        "",
        "`1`: the world may shrink (`--nnodes MIN:MAX`); else `0`.",
    ),
    "REKINDLE_JOINS": (
        "agent",
        "ranks with MindIO's API",
        "",
        "",
        "`1`: the rank joins ranks that already train; else `0`.",
    ),
    "REKINDLE_CHANNEL_FD": ("agent", "ranks", "", "", "Descriptor of the socket to the agent."),
    "REKINDLE_HEARTBEAT_FD": ("agent", "ranks", "", "", "Descriptor of the heartbeat page."),
    "REKINDLE_STACK_FILE": ("agent", "ranks", "", "", "File for the stacks of a hung rank."),
    "REKINDLE_PROFILING": ("agent", "ranks", "", "", "Folder for records of light profiling."),
    "REKINDLE_METRICS_FILE": ("agent", "ranks", "", "", "File for step records."),
    "REKINDLE_SNAPSHOT_EVERY": (
        "agent",
        "ranks",
        "steps",
        "",
        "Steps between two snapshots; 0: none.",
    ),
    "REKINDLE_CHECKPOINT_STORE": ("agent", "ranks", "", "", "Location of checkpoints."),
    "MA_SCHEDULE_CNT": (
        "agent",
        "script",
        "placements",
        "",
        "How often the platform has placed the node (name of ModelArts).",
    ),
    "REKINDLE_FIRST_START": (
        "agent",
        "scripts, ranks",
        "",
        "1 without an agent",
        "1: no process of this rank has run in the job before; otherwise 0.",
    ),
    "MA_PROC_START_CNT": (
        "agent",
        "script",
        "starts",
        "",
        "How often this agent has started the rank (name of ModelArts).",
    ),
}

_MINDSPORE: dict[str, Row] = {
    "MS_ROLE": ("agent", "MindSpore", "", "", "`MS_WORKER` in ranks, `MS_SCHED` in the scheduler."),
    "MS_SCHED_HOST": ("agent", "MindSpore", "", "", "Address of the scheduler."),
    "MS_SCHED_PORT": ("agent", "MindSpore", "TCP port", "", "Port of the scheduler."),
    "MS_NODE_ID": ("agent", "MindSpore", "rank", "", "Rank in the world."),
    "MS_WORKER_NUM": ("agent", "MindSpore", "ranks", "", "Ranks in the world."),
    "MS_LOCAL_WORKER": ("agent", "MindSpore", "ranks", "", "Ranks of the node."),
    "RANK_ID": ("agent", "MindSpore", "rank", "", "Rank in the world."),
    "RANK_SIZE": ("agent", "MindSpore", "ranks", "", "Ranks in the world."),
    "DEVICE_ID": ("agent", "MindSpore", "device number", "", "Device of the rank on its node."),
    "MS_TOPO_TIMEOUT": (
        "user, agent",
        "MindSpore",
        "seconds",
        "`join_timeout_s` of the policy",
        "Time for all ranks to meet at the scheduler.",
    ),
    "MS_CPU_COMM_OP_TIMEOUT": (
        "user, agent",
        "MindSpore",
        "seconds",
        code(PATIENCE_S),
        "Time limit of a collective on the CPU.",
    ),
    "MS_NODE_TIMEOUT": (
        "user, agent",
        "MindSpore",
        "seconds",
        code(PATIENCE_S),
        "Time without a heartbeat after which the scheduler reports a rank as lost.",
    ),
    "MS_RETRY_INTERVAL_LOWER": (
        "user, agent",
        "MindSpore",
        "seconds",
        "`1`",
        "Shortest time between two attempts to reach the scheduler.",
    ),
    "MS_RETRY_INTERVAL_UPPER": (
        "user, agent",
        "MindSpore",
        "seconds",
        "`1`",
        "Longest time between two attempts to reach the scheduler.",
    ),
    "MS_ENABLE_TFT": (
        "user, `rekindle.training.msrun`",
        "msrun",
        "",
        "`RSC:1` added",
        "Has msrun start its workers through Rekindle's agent.",
    ),
    "MS_ENABLE_RECOVERY": (
        "user",
        "MindSpore",
        "",
        "none",
        "Workers of `rekindle.training.msrun` get the value of the user.",
    ),
    "REKINDLE_MSRUN": ("`rekindle.training.msrun`", "its workers", "", "", "Process id of msrun."),
    "REKINDLE_MSRUN_PATH": (
        "`rekindle.training.msrun`",
        "its workers",
        "",
        "",
        "The user's `PATH`, which the worker restores.",
    ),
    "PATH": (
        "user, `rekindle.training.msrun`",
        "msrun",
        "",
        "",
        "Starts with the folder of the running Python while msrun starts its workers.",
    ),
}

_ASCEND: dict[str, Row] = {
    "HCCL_OP_RETRY_ENABLE": (
        "user, agent",
        "HCCL",
        "",
        "`L0:0, L1:1, L2:1` on NPUs",
        "Whether HCCL repeats a failed operator, by level (L0 to L2, each 0 or 1, each once).",
    ),
    "HCCL_CONNECT_TIMEOUT": (
        "user, agent",
        "HCCL",
        "seconds",
        "on NPUs `join_timeout_s` of the policy, raised to 120 or lowered to 7200",
        "Time for ranks to connect. Rekindle accepts whole numbers from 120 to 7200.",
    ),
    "HCCL_EXEC_TIMEOUT": (
        "user",
        "HCCL",
        "seconds",
        "HCCL's",
        "Time limit of a collective. Rekindle only checks that it is a whole number.",
    ),
    "HCCL_ASYNC_ERROR_HANDLING": (
        "user, agent",
        "HCCL",
        "",
        "`0` on NPUs if the policy allows one of these strategies",
        "Whether a failed collective ends its process: 0, 1 or 2. Rekindle refuses 1 and 2 if the "
        f"policy allows one of {_INNER}, as it does by default.",
    ),
    "PYTORCH_NO_NPU_MEMORY_CACHING": (
        "user",
        "torch-npu",
        "",
        "none",
        "Rekindle refuses it on NPUs: without the memory pool it cannot locate a memory error.",
    ),
    "TORCH_DEVICE_BACKEND_AUTOLOAD": (
        "user, agent",
        "torch",
        "",
        "`0` if torch-npu is installed and CANN is missing",
        "Whether torch loads torch-npu by itself.",
    ),
    "MINDX_TASK_ID": (
        "MindCluster",
        "agents, ranks",
        "",
        "none",
        "Where it is set, records of light profiling go to the folder of MindCluster.",
    ),
}

_PROCESSES = "only with `recover_strategy`."
_POD: dict[str, Row] = {
    "REKINDLE_POD_IP": ("pod", "`rekindle run`", "", "", "Address of the pod (`--local-addr`)."),
    "REKINDLE_HOST_NAME": (
        "pod",
        "agents",
        "",
        "the hostname",
        "Name of the node, by which Rekindle records faults of hosts.",
    ),
    "PYTHONUNBUFFERED": ("agent, pod", "Python", "", "`1`", "Ranks print without delay."),
    "XDL_IP": ("pod", "MindCluster", "", "", "Address of the host; see above."),
    "POD_IP": ("pod", "MindCluster", "", "", "Address of the pod; see above."),
    "ASCEND_VISIBLE_DEVICES": (
        "pod",
        "Ascend Docker Runtime",
        "",
        "",
        "NPUs of the pod, if `kubernetes.device` is given; see above.",
    ),
    "TTP_PORT": (
        "pod",
        "MindCluster",
        "TCP port",
        code(TTP_PORT),
        "Port of MindCluster's controller; see above.",
    ),
    "PROCESS_RECOVER": ("pod", "MindCluster", "", "`on`", f"Recovery of processes; {_PROCESSES}"),
    "ELASTIC_PROCESS_RECOVER_ENABLE": (
        "pod",
        "MindCluster",
        "",
        "`1`",
        f"Recovery of processes; {_PROCESSES}",
    ),
    "MINDIO_WAIT_MINDX_TIME": (
        "pod",
        "MindCluster",
        "seconds",
        "`60`",
        f"Time that MindIO waits; {_PROCESSES}",
    ),
    "TASKD_PROCESS_ENABLE": (
        "pod",
        "MindCluster",
        "",
        "`on`",
        f"Recovery of processes; {_PROCESSES}",
    ),
}

_RETRAIN: dict[str, Row] = {
    "REKINDLE_CHECKPOINT": (
        "retrain flow",
        "the evaluate command",
        "",
        "",
        "Folder of the checkpoint to evaluate.",
    ),
    "REKINDLE_METRICS": (
        "retrain flow",
        "the evaluate command",
        "",
        "",
        "File for the metrics of the evaluation, as one JSON object.",
    ),
    "REKINDLE_COMMAND_LOCK": (
        "retrain flow",
        "retrain flow",
        "",
        "",
        "Marks the processes of a command, so that the flow can end them.",
    ),
}

GROUPS: dict[str, dict[str, Row]] = {
    "For users": _USER,
    "In ranks": _RANK,
    "In ranks of MindSpore": _MINDSPORE,
    "Ascend NPUs": _ASCEND,
    "In pods": _POD,
    "In commands of the retrain flow": _RETRAIN,
}
