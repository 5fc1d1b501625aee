"""DLRover: detection of faulty and slow nodes, and its command line."""

from __future__ import annotations

from specification.row import Document, none, run, source

_HERE = "integration/specification/test_002.py"
_RANGE = f"{_HERE}::test_a_range_of_nodes_and_no_rendezvous"
_CHECKED = f"{_HERE}::test_the_option_checks_each_node"
_RESTARTS = f"{_HERE}::test_the_option_limits_the_restarts"
_TORCHRUN = f"{_HERE}::test_the_options_of_torchrun"
_CHECK = "integration/faults/test_node_check.py"
_REPLACED = f"{_CHECK}::test_sick_nodes_are_replaced"
_SPARE = f"{_CHECK}::test_a_spare_takes_the_place_of_a_sick_node"
_HEALTHY = f"{_CHECK}::test_healthy_nodes_train"
_MACHINE = "unit/coordinator/machine/test_node_check.py"
_VERDICTS = "unit/recovery/node_check/test_verdicts.py"
_ELASTIC = "integration/faults/test_elastic.py::test_the_world_shrinks_and_grows"
_OPTIONS = "integration/run/test_parity.py::test_every_option_of_torchrun_is_taken"
_FAULTY = "A pod on a faulty machine"
_SLOW = "A pod on a slow node"
_LAUNCHER = "torchrun"
_EXAMPLE = "Example of torchrun"
_RUN = "dlrover-run"
_COMMAND = "Example of dlrover-run"
_DETECTION = "Detection of faulty nodes"
_AGENTS = "Classes of agents"

ROWS = (
    run(
        _FAULTY,
        "A process kills the checkers of one pod again and again, as a faulty machine would.",
        "The test does so with the checkers of one host, by SIGKILL.",
        _REPLACED,
    ),
    none(
        _FAULTY,
        "The script `start_chaos.sh kill-process` of the examples does this; a `sed` line adapts "
        "it to the name of the checker.",
        "Rekindle has no such script. The processes of the check have the name `rekindle-check`.",
    ),
    none(
        _FAULTY,
        "More than 3 nodes are necessary to find a faulty machine.",
        "Rekindle needs fewer: 3 nodes show which one does not reach the others, and a node that "
        "fails alone is found in any number.",
    ),
    run(
        _FAULTY,
        'The pod ends with an error, and its log has "The node is down.".',
        "The agent ends with status 1 and that text, and the incident has it.",
        _REPLACED,
        _SPARE,
    ),
    run(
        _FAULTY,
        "A new pod starts without a person, and replaces the faulty node.",
        "A spare or a new node replaces it, on another host. In Kubernetes it is a new pod.",
        _REPLACED,
        _SPARE,
    ),
    run(
        _SLOW,
        "The option `--exclude-straggler` is given.",
        "It excludes slow nodes, and implies the check.",
        _REPLACED,
        f"{_HERE}::test_the_option_excludes_stragglers",
    ),
    none(
        _SLOW,
        "A load of 90 % of the CPU of one pod makes it a slow node (chaosblade).",
        "Rekindle's tests slow down the products of one host instead. A load of the CPU slows a "
        "check on CPUs; on devices it may not, and then the node is healthy.",
    ),
    none(
        _SLOW,
        "With too few CPUs a pod cannot form its groups, and the whole job fails.",
        "A node that measures no value in `--node-check-timeout` has failed that task. The job "
        "does not fail for it alone.",
    ),
    run(
        _SLOW,
        'The pod ends with an error, and its log has "The node is a straggler and exits.".',
        "As for a faulty node, with this text.",
        _REPLACED,
    ),
    run(
        _SLOW,
        "A new pod starts without a person, and replaces the slow node.",
        "So it does.",
        _REPLACED,
    ),
    run(
        _LAUNCHER,
        "torchrun starts several processes on several nodes.",
        "`rekindle run` takes all options of torchrun.",
        _OPTIONS,
        _TORCHRUN,
    ),
    run(
        _LAUNCHER,
        "With the elastic part of PyTorch it trains with a changing number of nodes.",
        "A job with a Session shrinks and grows between two steps.",
        _ELASTIC,
    ),
    run(
        _EXAMPLE,
        "`--nnodes` is the number of nodes.",
        "The same.",
        _TORCHRUN,
    ),
    run(
        _EXAMPLE,
        "`--nproc_per_node` is the number of processes on each node.",
        "The same; both spellings, with `_` and with `-`, are taken.",
        _TORCHRUN,
        _OPTIONS,
    ),
    run(
        _EXAMPLE,
        "`--rdzv_id` is the unique id of the rendezvous.",
        "It is the id of the job, and `TORCHELASTIC_RUN_ID` of the ranks.",
        _TORCHRUN,
    ),
    run(
        _EXAMPLE,
        "`--rdzv_backend` is the backend of the rendezvous, usually c10d.",
        "c10d is taken.",
        _TORCHRUN,
    ),
    run(
        _EXAMPLE,
        "`--rdzv_endpoint` has the address and port of the rendezvous.",
        "The command on the machine with this address hosts the coordinator at this port.",
        _TORCHRUN,
        "integration/run/test_endpoints.py::test_the_machine_of_the_endpoint_hosts_the_job",
    ),
    run(
        _RUN,
        "It does what torchrun does, and more.",
        "So does `rekindle run`: the ranks of a script find the same environment.",
        "integration/run/test_parity.py::test_a_script_finds_the_world_of_torchrun",
    ),
    run(
        _RUN,
        "It finds faulty and slow nodes.",
        "With `--network-check`.",
        _CHECKED,
        _SPARE,
    ),
    run(
        _RUN,
        "It needs less configuration for several nodes with several workers.",
        "On one machine no rendezvous is given. Several machines need `--rdzv-endpoint`, or the "
        "command that the first one prints. In Kubernetes the engine sets all of it.",
        _RANGE,
        "integration/run/test_endpoints.py::test_the_printed_command_works_on_another_machine",
    ),
    none(
        _COMMAND,
        "The program is `/usr/local/bin/dlrover-run`.",
        "The program is `rekindle run`. There is no alias with that name or path.",
    ),
    run(
        _COMMAND,
        "`--network-check` enables the detection.",
        "The same.",
        _CHECKED,
    ),
    run(
        _COMMAND,
        "`--nnodes=2:3` is a range of nodes instead of a fixed number.",
        "The job starts with up to 3 nodes and continues with 2. Only a script with a Session "
        "continues without a restart.",
        _RANGE,
        _ELASTIC,
    ),
    run(
        _COMMAND,
        "`--max_restarts=3` limits the restarts.",
        "The same. Recoveries of single ranks do not count.",
        _RESTARTS,
    ),
    run(
        _COMMAND,
        "The script and its arguments follow the options.",
        "The same; the script gets all of them.",
        _RANGE,
    ),
    none(
        _COMMAND,
        "The script `examples/pytorch/mnist/cnn_train.py` trains with pictures in "
        "`/data/mnist_png/training/` and `/data/mnist_png/testing/`.",
        "That script is not in this repository, and no test runs it.",
    ),
    run(
        _DETECTION,
        "The option is given at the start of the job.",
        "The same, or `node_check` of a job file or of Prefect's form.",
        _CHECKED,
        "integration/flow/test_check_nodes.py::test_a_sick_node_is_isolated_and_shown",
    ),
    none(
        _DETECTION,
        "Each rendezvous of the agents runs the check before the workers start.",
        "The check runs before each attempt, and for each node that joins later. A restart of all "
        "ranks in the same agents, or a recovery of one rank, runs no check.",
    ),
    run(
        _DETECTION,
        "A process for each device runs a light task that checks the machine.",
        "Each node has one process for each device.",
        _CHECKED,
        _HEALTHY,
    ),
    none(
        _DETECTION,
        "The script for GPUs is `python -m dlrover.trainer.torch.node_check.nvidia_gpu`.",
        "No module has this name. One checker of Rekindle serves CPU, GPU and NPU with PyTorch, "
        "and the agent starts it.",
    ),
    none(
        _DETECTION,
        "The script for Ascend is `python -m dlrover.trainer.torch.node_check.ascend_npu`.",
        "As above. On an NPU it uses torch_npu and HCCL; no test ran on an NPU.",
    ),
    run(
        _DETECTION,
        "The task has a simple GEMM and an allgather.",
        "It has a product with a known result, copies in memory, all-gather, all-reduce and a "
        "transfer, and compares the results.",
        _HEALTHY,
        "integration/ranks/test_check_work.py::test_collectives_that_come_out_well",
    ),
    source(
        _DETECTION,
        "On Ascend the same task runs on the NPU.",
        "The device is found through torch_npu, and its `stress_detect` runs as well. Tests use a "
        "double of torch_npu.",
        "integration/ranks/test_npu_stress.py::test_what_its_answers_mean",
    ),
    run(
        _DETECTION,
        "Nodes form groups of two, and report their times to the master of the job.",
        "Pairs of nodes do the collectives, and the agents report to the coordinator. Before that "
        "each node is measured alone.",
        _HEALTHY,
        _CHECKED,
    ),
    source(
        _DETECTION,
        "If a task fails, a second round follows.",
        "A node whose task alone failed repeats it. Each node meets several others in any case, "
        "so a failed pair is not repeated.",
        f"{_VERDICTS}::test_a_node_that_fails_alone_once_is_not_blamed",
        f"{_MACHINE}::test_those_whose_collectives_fail_are_named",
    ),
    none(
        _DETECTION,
        "At least 4 nodes are necessary to find the faulty one; otherwise the training fails.",
        "Rekindle does not fail: it names the node with 3 nodes, and with 2 nodes whose collective "
        "fails both are `unknown` and train.",
    ),
    none(
        _AGENTS,
        "ElasticAgent, SimpleElasticAgent and LocalElasticAgent of PyTorch are the base of the "
        "agents: an interface, a strategy, and the local agent.",
        "Rekindle's agent is a process of its own, and extends no class of PyTorch.",
    ),
    none(
        _AGENTS,
        "ElasticTrainingAgent extends LocalElasticAgent: the master tells it the network.",
        "The class does not exist. The coordinator sends each agent its peers.",
    ),
    none(
        _AGENTS,
        "NodeCheckElasticAgent overrides `run`: it checks the node and does not train.",
        "The class does not exist. The agent of the job starts the checkers. The flow "
        "`check-nodes` is a job that checks and does not train.",
    ),
)

DOCUMENT = Document("002", "DLRover: detection of faulty and slow nodes", ROWS)
