"""MindCluster: online recovery of processes."""

from __future__ import annotations

from specification.row import Document, none, run, source

_HERE = "integration/specification/test_000.py"
_MANIFEST = f"{_HERE}::test_the_manifest"
_WORDS = f"{_HERE}::test_combinations_of_strategies"
_SWITCH = f"{_HERE}::test_the_switch"
_REFUSED = f"{_HERE}::test_other_words_are_refused"
_SCRIPT = f"{_HERE}::test_the_start_script"
_OPTIONS = f"{_HERE}::test_the_options_of_the_start_script"
_PODS = "integration/pods/test_mindcluster.py::test_mindclusters_own_recovery"
_RETRY = "integration/faults/test_retry.py::test_fault_inside_a_step"
_KILLED = "integration/faults/test_killed_rank.py::test_killed_rank"
_LOST = "integration/faults/test_lost_node.py::test_lost"
_SAVED = "integration/faults/test_final_checkpoint.py::test_end"
_VARIABLES = "unit/job/test_ascend.py::test_hccl_leaves_repairable_ranks_alive"
_WRONG = "unit/job/test_ascend.py::test_wrong_values_are_refused"
_MSRUN = "unit/training/test_msrun.py::test_an_agent_is_asked_for_and_nothing_is_taken_away"
_IMAGE = "Build the image"
_YAML = "Prepare the YAML of the job"
_MINDSPORE = "Prepare the YAML of the job: MindSpore"
_ADAPT = "Adapt the training script"
_NETWORK = "Adapt the training script: network faults"

ROWS = (
    none(
        _IMAGE,
        "A Dockerfile builds the image of the container, with added commands.",
        "`docker/training.Dockerfile` builds an image with Rekindle on any base. No test has built "
        "it.",
    ),
    none(
        _IMAGE,
        "`pip3 install $MINDX_ELASTIC_PKG` installs the wheel of the Elastic Agent.",
        "The recipe installs all wheels of the folder `docker/wheels`. No public registry has this "
        "one. Rekindle's own agent does its work.",
    ),
    none(
        _IMAGE,
        "`pip3 install $MINDIO_TTP_PKG` installs the wheel of MindIO.",
        "As above. `rekindle.training.mindio` has MindIO's names where the wheel is absent "
        "(`integration/mindspore/test_mindio.py`).",
    ),
    none(
        _IMAGE,
        "A `sed` line puts `import mindx_elastic.api` into `torch/distributed/run.py`. It is "
        "obligatory for graceful tolerance and for the rescheduling of pods and processes.",
        "Rekindle needs no change of torch, because its agent starts the ranks itself. If the job "
        "starts torchrun, the line stays the image's own.",
    ),
    none(
        _IMAGE,
        "With MindSpore, `pip install $TASKD_WHL` is necessary for the online recovery.",
        "As above. It is not necessary: where TaskD is absent, `rekindle.training.msrun` gives "
        "msrun an agent with TaskD's names (`integration/mindspore/test_msrun.py`). That agent "
        "restarts all workers; the online recovery needs a Session or MindIO's names.",
    ),
    run(
        _YAML,
        "The label `process-recover-enable` is the switch: process-level recovery needs `on`.",
        "The same, `pause` and `off` too. Without the label an annotation `recover-strategy` "
        "switches it on, as in MindCluster 7.2 and later, and a line says so.",
        _SWITCH,
        _MANIFEST,
    ),
    run(
        _YAML,
        'The label `fault-scheduling` is `"force"`.',
        "`fault_scheduling: force` of `kubernetes.ascend` writes it. In a policy file it allows "
        "both job reschedules.",
        _MANIFEST,
        _WORDS,
        _REFUSED,
    ),
    run(
        _YAML,
        "The annotation `recover-strategy` names the strategies that the job may use.",
        "`recover_strategy` writes it for MindCluster, and a policy file with it gives Rekindle's "
        "strategies.",
        _MANIFEST,
        _WORDS,
    ),
    run(
        _YAML,
        "`retry` is the online recovery of a process.",
        "`retry`: the processes stay, and all ranks repeat the step. A memory fault of an NPU is "
        "injected; no test ran on an NPU.",
        _WORDS,
        _RETRY,
    ),
    run(
        _YAML,
        "`recover` is the rescheduling of a process.",
        "`recover`: the ranks of one node move to a spare or a new node, and the others wait.",
        _WORDS,
        _LOST,
    ),
    run(
        _YAML,
        "`recover-in-place` is the recovery of a process in its place.",
        "`recover-in-place`: the agent starts one rank again.",
        _WORDS,
        _KILLED,
    ),
    run(
        _YAML,
        "`dump` saves a last checkpoint.",
        "`dump`: the job writes a final checkpoint and ends.",
        _WORDS,
        _SAVED,
    ),
    run(
        _YAML,
        "`exit` ends the training.",
        "It is `fail`, which is always possible. So the word alone allows nothing else.",
        _WORDS,
    ),
    run(
        _YAML,
        "The five strategies may be combined freely, separated by commas.",
        "Every combination is taken. `elastic-training` is taken too, and other words are refused.",
        _WORDS,
        _REFUSED,
        "unit/recovery/policy/test_ladder_mindcluster.py::test_any_combination_of_strategies",
    ),
    run(
        _YAML,
        "`spec.replicaSpecs` has the roles Master and Worker.",
        "An AscendJob has them: one Master, and the other nodes as Workers.",
        _MANIFEST,
        _PODS,
    ),
    run(
        _YAML,
        "The container has the name `ascend`, which must not change.",
        "It has this name.",
        _MANIFEST,
    ),
    run(
        _YAML,
        "The variable `PROCESS_RECOVER` with `on` switches the online recovery on.",
        "The containers of both roles have it if `recover_strategy` is given. Rekindle's own "
        "strategies do not read it.",
        _MANIFEST,
        _SCRIPT,
    ),
    run(
        _YAML,
        "The arguments of the container export `ELASTIC_PROCESS_RECOVER_ENABLE=1`.",
        "The containers have it as a variable, and the export of a script reaches its ranks.",
        _MANIFEST,
        _SCRIPT,
    ),
    run(
        _YAML,
        "The container runs `bash scripts/train_start.sh /job/code /job/output pretrain_gpt.py`.",
        "`rekindle run --no-python`, or `program` and `arguments` of a job, run it, and start it "
        "again after a failure. The launcher in the script starts the ranks.",
        _SCRIPT,
    ),
    none(
        _YAML,
        "The command runs in the container of MindCluster, and MindCluster recovers it.",
        "With `recovery: mindcluster` the container runs `rekindle run --coordinator`, which "
        "starts the command. It starts no Elastic Agent and no manager or proxy of TaskD. So "
        "MindCluster can place pods again, but only the command itself can bring its process-level "
        "recovery into the container.",
    ),
    run(
        _YAML,
        "`--enable-high-availability` switches on MindSpeed's part of the recovery.",
        "The script gets the option. It is MindSpeed's own, and no test ran MindSpeed.",
        _SCRIPT,
    ),
    run(
        _YAML,
        "`--enable-hbmfault-repair` switches on MindSpeed's repair of memory.",
        "As above.",
        _SCRIPT,
    ),
    run(
        _YAML,
        "Master and Worker have the same variable and command.",
        "Both have the same container.",
        _MANIFEST,
    ),
    none(
        _MINDSPORE,
        "The configuration is `LLAMA2_for_MS_code/configs/llama2/pretrain_llama2_7b.yaml`.",
        "It belongs to MindFormers. Rekindle does not read it, and no test ran MindFormers.",
    ),
    none(
        _MINDSPORE,
        "`context` has `mode: 0` (graph mode; 1 is PyNative), `device_target`, `device_id`, "
        "`graph_kernel_flags`, `max_call_depth`, `max_device_memory` and `mempool_block_size` "
        '("59GB"), `save_graphs`, `save_graphs_path` and `memory_optimize_level`.',
        "These are MindSpore's settings, and the script gives them. Rekindle sets none of them.",
    ),
    none(
        _MINDSPORE,
        '`jit_config` has `jit_level: "O1"`.',
        "As above.",
    ),
    none(
        _MINDSPORE,
        "`ascend_config` has `hccl_watchdog: False`.",
        "As above. HCCL's watchdog would end a rank whose collective waits for its peer.",
    ),
    run(
        _ADAPT,
        "The start script may add `--max_restarts` and `--monitor_interval` (optional).",
        "Both are options of `rekindle run`. A script that starts torchrun gives them to torchrun.",
        _OPTIONS,
        _SCRIPT,
    ),
    run(
        _ADAPT,
        "`DISTRIBUTED_ARGS` has `--nproc_per_node`, `--nnodes`, `--node_rank`, `--master_addr` and "
        "`--master_port`.",
        "`rekindle run` takes them, one command on each node. A program of a job gets the values "
        "as `WORLD_SIZE`, `RANK`, `MASTER_ADDR` and `MASTER_PORT`.",
        _OPTIONS,
        _SCRIPT,
    ),
    run(
        _ADAPT,
        "The example is `--max_restarts 5 --monitor_interval 10`.",
        "Five restarts are allowed. Rekindle's agent sees the end of a process at once and takes "
        "the interval only because torchrun has it.",
        _OPTIONS,
    ),
    none(
        _NETWORK,
        "If HCCL cannot repeat an operator, because it changes its input or the operators differ, "
        "the online recovery of processes may follow.",
        "A failed collective of a rank with a Session leads to `retry`. That HCCL has tried to "
        "repeat the operator is not known. No test ran HCCL.",
    ),
    source(
        _NETWORK,
        '`HCCL_OP_RETRY_ENABLE="L0:0, L1:1, L2:1"` switches on the repetition of operators.',
        "It is the default of Rekindle on NPUs. An own value stays, and a wrong one is refused.",
        _VARIABLES,
        _WRONG,
        _SCRIPT,
    ),
    source(
        _NETWORK,
        "`HCCL_ASYNC_ERROR_HANDLING=0` is set.",
        "Rekindle sets it on NPUs if the policy has a strategy for single processes, and refuses 1 "
        "and 2 then.",
        _VARIABLES,
        _WRONG,
        _SCRIPT,
    ),
    none(
        _NETWORK,
        "MindFormers sets the variables in `msrun_launcher.sh`.",
        "That file is MindFormers'. A program of a job may be this script.",
    ),
    source(
        _NETWORK,
        "`MS_ENABLE_TFT='{TTP:1, HCCE:1}'` switches on the repetition for MindSpore.",
        "It reaches MindSpore unchanged, except that `rekindle.training.msrun` adds `RSC:1` to a "
        "value that asks for no agent.",
        _MSRUN,
    ),
    none(
        _NETWORK,
        "HCCL repeats an operator after an SDMA error or an RDMA CQE error.",
        "HCCL does this below Rekindle, which sees only a failed collective.",
    ),
)

DOCUMENT = Document("000", "MindCluster: online recovery of processes", ROWS)
