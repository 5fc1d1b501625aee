"""TaskD: profiling of slow nodes."""

from __future__ import annotations

from specification.row import Document, none, run, source

_HERE = "integration/specification/test_001.py"
_CALLS = f"{_HERE}::test_the_calls_of_the_script"
_STAYS = f"{_HERE}::test_an_installed_taskd_stays"
_MANIFEST = f"{_HERE}::test_the_manifest"
_SHELL = "integration/run/test_shell.py"
_RECORDS = f"{_SHELL}::test_records_of_a_running_job"
_SLOW = f"{_SHELL}::test_who_is_slow_is_named"
_FIVE = "integration/faults/test_profiling.py::test_five_kinds_are_written"
_OFF = "integration/faults/test_profiling.py::test_off_again"
_FLOW = "integration/flow/test_profile.py::test_a_training_run_is_switched_and_shown"
_FILES = "unit/profiling/test_files.py"
_NAMED = f"{_FILES}::test_folders_are_named_after_the_task"
_NEWEST = f"{_FILES}::test_records_go_to_the_newest_file"
_LARGE = f"{_FILES}::test_a_file_that_is_too_large_is_followed_by_another"
_TEN = f"{_FILES}::test_it_ends_at_ten_mebibytes"
_AGES = f"{_FILES}::test_the_oldest_fifth_ages"
_OURS = f"{_FILES}::test_only_files_with_numbers_of_ranks_are_ours"
_LINES = "unit/profiling/test_markers.py::test_ours_are_one_object_a_line_with_the_seeds_fields"
_CLUSTERD = "unit/engines/kubernetes/mindcluster/test_clusterd.py"
_COMMAND = f"{_CLUSTERD}::test_the_command"
_ASKS = f"{_CLUSTERD}::test_the_command_asks_clusterd"
_FORM = f"{_CLUSTERD}::test_the_form_that_mindcluster_expects"
_MOUNTED = "unit/agent/test_profiling_files.py::test_what_is_new_is_told_once"
_PLUGIN = "unit/training/test_msrun.py::test_the_plugin_of_earlier_taskds_is_the_same_agent"
_WORKERS = "integration/mindspore/test_msrun.py::test_workers_are_watched"
_PURPOSE = "Purpose"
_TABLE = "Table 1, the kinds of records"
_LIMITS = "Constraints"
_BEFORE = "Preconditions"
_CONFIGURE = "Configure the detection"
_PYTORCH = "Configure the detection: manager and proxy, PyTorch"
_MINDSPORE = "Configure the detection: manager and proxy, MindSpore"
_WORKER = "Configure the detection: worker"
_YAML = "Change the YAML of the job"
_SWITCH = "Switch the records on"
_DATA = "Read the records"

ROWS = (
    run(
        _PURPOSE,
        "Records of a job diagnose nodes that have become slow.",
        "`rekindle diagnose` and the running job compare the records of all ranks and name a slow "
        "rank, node or link.",
        _SLOW,
    ),
    run(
        _PURPOSE,
        "The records are made while the job runs, and are kept in files.",
        "Each rank with a Session writes files.",
        _RECORDS,
        _FIVE,
    ),
    run(
        _PURPOSE,
        "They can be switched on and off while the job runs, without a restart.",
        "`rekindle profile JOB on|off`, the flow `profile`, and MindCluster's switch do this.",
        _RECORDS,
        _OFF,
        _FLOW,
    ),
    none(
        _PURPOSE,
        "They cost the training nothing.",
        "A benchmark measures 0.999 +- 0.010 of the time without records (18.7 ms per step). No "
        "test compares times.",
    ),
    run(
        _TABLE,
        "FP marks the forward pass: for PyTorch, only with single operators, by mstx_torch_plugin.",
        "`forward`: a Session for PyTorch records it without a plugin.",
        _FIVE,
    ),
    run(
        _TABLE,
        "Step marks the time of a step, for PyTorch and MindSpore.",
        "`step`: the body of `with step:`. The run is with PyTorch.",
        _FIVE,
        _RECORDS,
    ),
    run(
        _TABLE,
        "Communication marks collectives, for PyTorch and MindSpore.",
        "`communication`: collectives of gloo with PyTorch. Those of HCCL, NCCL and MindSpore have "
        "no record of Rekindle; TaskD's own records of them are read.",
        _FIVE,
    ),
    run(
        _TABLE,
        "SaveCheckpoint marks the time of a checkpoint, for PyTorch and MindSpore.",
        "`save-checkpoint`: the time that training stops for it. The run is with PyTorch.",
        _FIVE,
    ),
    run(
        _TABLE,
        "DataLoader marks the time of the data loader, for PyTorch and MindSpore.",
        "`data-loader`: the wait for `step.batch`. The run is with PyTorch.",
        _FIVE,
    ),
    run(
        _LIMITS,
        "Step, SaveCheckpoint, FP and DataLoader are switched on together.",
        "Any of them switches on all four.",
        _FLOW,
        "unit/profiling/test_switch.py::test_all_but_communication_go_together",
    ),
    run(
        _LIMITS,
        "To switch these four off, Communication must be off too.",
        "Otherwise the order is refused with this reason.",
        _OFF,
        _FLOW,
    ),
    run(
        _LIMITS,
        "Communication can be switched on and off alone.",
        "Off alone: yes. On alone: it switches on the other four too, as in TaskD, which records "
        "these unless all five are off.",
        _OFF,
        "unit/profiling/test_switch.py::test_a_missing_field_is_not_off",
    ),
    none(
        _LIMITS,
        "MindStudio's full profiling must not be on at the same time.",
        "Rekindle does not know whether it is on.",
    ),
    none(
        _BEFORE,
        "The packages are prepared, and TaskD is 7.1.RC1 or later.",
        "Rekindle needs no package of MindCluster. It reads the records that TaskD's source of "
        "2026-08-21 writes.",
    ),
    none(
        _CONFIGURE,
        "mstx_torch_plugin is installed in the container (optional).",
        "It is not necessary for Rekindle's records.",
    ),
    none(
        _CONFIGURE,
        'Without it, the loop marks each step with `torch.npu.mstx.range_start(f"step {id}", '
        "stream)` and `range_end` (optional).",
        "`with step:` marks it. Marks of the script are MindStudio's: Rekindle sees them only in "
        "TaskD's files.",
    ),
    none(
        _CONFIGURE,
        "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` sets the variables of CANN.",
        "Rekindle does not read this file. Ranks get the environment of the agent, so an image or "
        "a start script sets it. `rekindle npu-check` prints what is missing.",
    ),
    none(
        _CONFIGURE,
        "`LD_PRELOAD` names `libmspti.so` and `libtaskd.so`.",
        "Rekindle's records need neither. A value in the environment of a job reaches its ranks.",
    ),
    none(
        _CONFIGURE,
        "`libmspti.so` is in `/usr/local/Ascend/ascend-toolkit/latest/lib64`, and `libtaskd.so` "
        "below the place that `pip show taskd` prints, in `taskd/python/cython_api/libs`.",
        "As above: Rekindle looks for neither.",
    ),
    run(
        _CONFIGURE,
        "The script starts a manager, each node a proxy, and each rank a worker, after its rank is "
        "known.",
        "Where TaskD is absent, its names exist in the ranks of a script or module. The "
        "coordinator, the agent and the Session do the work, so the calls start nothing.",
        _CALLS,
        _STAYS,
    ),
    run(
        _PYTORCH,
        "`manager.py` calls `init_taskd_manager` and `start_taskd_manager` of `taskd.api`.",
        "Both names exist and return True for this job. `start_taskd_manager` returns at once.",
        _CALLS,
    ),
    run(
        _PYTORCH,
        "`init_taskd_manager` gets `job_id` (from `MINDX_TASK_ID`), `node_nums` and "
        "`proc_per_node`.",
        "A number that differs from the job's gives one line and the value False. The id is taken "
        "as it is.",
        _CALLS,
    ),
    none(
        _PYTORCH,
        "`manager.py` is beside the training script, and `python manager.py &` starts it on the "
        "node with `RANK` 0.",
        "The names exist only in processes that Rekindle starts. In a process of a shell script "
        "the import fails without TaskD's wheel. Leave the line out: the coordinator runs already.",
    ),
    none(
        _PYTORCH,
        "`MASTER_ADDR` is exported as `POD_IP` before.",
        "The engine sets `MASTER_ADDR` of all ranks.",
    ),
    run(
        _PYTORCH,
        "A `sed` line puts `import taskd.python.adaptor.patch` into `torch/distributed/run.py`.",
        "The line is not necessary. The module exists, and is empty.",
        _CALLS,
    ),
    none(
        _PYTORCH,
        "`torchrun ...` follows.",
        "A program of a job may start it (see document 000). Its ranks have no connection to the "
        "agent, so they write no records of Rekindle and do not have TaskD's names.",
    ),
    none(
        _MINDSPORE,
        "`manager.py` runs on the node whose `POD_IP` is `MS_SCHED_HOST`; then `msrun ...` "
        "follows.",
        "As for PyTorch: the coordinator runs already. `rekindle.training.msrun` starts msrun.",
    ),
    source(
        _MINDSPORE,
        "msrun's `_api.py` is changed: if `MS_ENABLE_TFT` has TTP, UCE or ARF, a thread calls "
        "`init_taskd_proxy`.",
        "The file stays as MindSpore has it. The names `init_taskd_proxy`, `CONFIG_UPSTREAMIP_KEY` "
        "and `LOCAL_HOST` exist in msrun and in the ranks; the run is in a rank.",
        _CALLS,
    ),
    run(
        _MINDSPORE,
        "`CONFIG_UPSTREAMIP_KEY` gets `MS_SCHED_HOST`, or `LOCAL_HOST` without it.",
        "The proxy accepts any configuration.",
        _CALLS,
    ),
    source(
        _MINDSPORE,
        "`MSRunPlugin` gets the callbacks `KILL_WORKER`, `START_ALL_WORKER`, `START_WORKER_LIST` "
        "and `MONITOR`.",
        "The plugin is Rekindle's agent for msrun. msrun of MindSpore 2.10 prefers the newer "
        "`taskd.api.taskd_agent_api`, with which the run is made.",
        _PLUGIN,
        _WORKERS,
    ),
    none(
        _MINDSPORE,
        "`MS_ENABLE_RECOVERY` becomes 1.",
        "msrun sets it, and the agent takes it away from the workers again, because MindSpore "
        "refuses some features with it.",
    ),
    run(
        _WORKER,
        "After `dist.is_initialized()`, `pretrain()` of MindSpeed calls `init_taskd_worker(rank, "
        "5000)` and `start_taskd_worker()`.",
        "Both names exist in `taskd.api.taskd_worker_api`. Another rank, and a start before the "
        "first call, give one line and the value False.",
        _CALLS,
    ),
    run(
        _WORKER,
        "5000 is the limit of all records in MB.",
        "It is the default. For another limit one line names the variable of the job that sets it, "
        "`REKINDLE_PROFILING_CAP_MB`.",
        _CALLS,
    ),
    none(
        _WORKER,
        "MindFormers calls both in `training_process()`, and prints a text if they fail.",
        "The calls work in a rank of `rekindle run`. Workers of msrun do not have the names, so "
        "the text is printed, and training continues. No test ran MindFormers.",
    ),
    run(
        _YAML,
        "All pods expose port 9601 with the name `taskd-port`.",
        "They do with `recovery: mindcluster`, or `ports: true`. Rekindle does not listen there.",
        _MANIFEST,
    ),
    source(
        _YAML,
        "The records are in `/user/cluster-info/profiling` of the container.",
        "They are, if the environment has `MINDX_TASK_ID`. Otherwise they are in the job directory "
        "of the node. The run renders the mount.",
        _MANIFEST,
        _NAMED,
    ),
    run(
        _YAML,
        "To keep them on the host, the YAML mounts `/user/cluster-info/` (volume `profilingdata`).",
        "`data_trace` mounts the folder `profiling` below it, from the same path of the host.",
        _MANIFEST,
    ),
    run(
        _YAML,
        "A host path `/user/cluster-info/datatrace-config/NAMESPACE.data-trace-JOB` has the switch "
        "(volume `profileswitch`).",
        "`data_trace` mounts this path at `/user/cluster-info/datatrace-config`. Its volume has "
        "the name `data-trace-config`.",
        _MANIFEST,
    ),
    source(
        _SWITCH,
        "The ConfigMap `data-trace` of the job switches the records.",
        "`rekindle kubernetes trace JOB --on KIND,...` writes it; its agents read the mounted file "
        "each second.",
        _COMMAND,
        _MOUNTED,
    ),
    run(
        _SWITCH,
        "So does ClusterD's service `ModifyTrainingDataTraceSwitch` (gRPC).",
        "With `--clusterd`, and in a pod of the cluster, the command calls it. Tests use a server "
        "with its proto; no test used a real ClusterD.",
        _ASKS,
    ),
    run(
        _SWITCH,
        "The call fails if the job does not exist.",
        "The command then ends with status 1 and the code, and writes no ConfigMap.",
        _ASKS,
    ),
    none(
        _SWITCH,
        "A ConfigMap that ClusterD makes ends with the job.",
        "ClusterD does this.",
    ),
    run(
        _SWITCH,
        "A ConfigMap of the user should have the job as its owner.",
        "The command writes this reference, so Kubernetes removes it with the job.",
        _COMMAND,
    ),
    run(
        _SWITCH,
        "The two ways should not be used together.",
        "The command uses one of them: after a refusal of ClusterD it writes no ConfigMap.",
        _ASKS,
    ),
    source(
        _SWITCH,
        "The name of the ConfigMap is `data-trace-` and the name of the job, and its label `reset` "
        "is `true`.",
        "The same.",
        _FORM,
        _COMMAND,
    ),
    source(
        _SWITCH,
        "`profilingSwitch` is JSON with `CommunicationOperator`, `Step`, `SaveCheckpoint`, `FP` "
        "and `DataLoader`, each `on` or `off`.",
        "The same. A damaged text is refused with the reason.",
        _FORM,
        f"{_CLUSTERD}::test_a_switch_that_is_damaged",
    ),
    run(
        _SWITCH,
        "`kubectl get cm`, `kubectl apply -f datacm.yaml` and `kubectl edit cm` find, make and "
        "change it.",
        "The object is an ordinary ConfigMap. The command overwrites a text that somebody has "
        "edited, and prints what is on.",
        _COMMAND,
    ),
    run(
        _SWITCH,
        "`CommunicationOperator` with `on` adds the collectives.",
        "`--on communication` writes it.",
        _COMMAND,
    ),
    run(
        _SWITCH,
        "Collectives may slow training down, and should not stay on.",
        "They are off unless the user names them.",
        _FLOW,
        _OFF,
    ),
    run(
        _DATA,
        "The records are in a folder for each rank.",
        "The same.",
        _RECORDS,
        _FIVE,
    ),
    source(
        _DATA,
        "With `MINDX_TASK_ID`, rank 0 writes into `/user/cluster-info/profiling/$MINDX_TASK_ID/0`.",
        "The same.",
        _NAMED,
    ),
    run(
        _DATA,
        "Without it, the folder is `default_task_id_` and a time.",
        "The same, with the time of the first order.",
        _FIVE,
    ),
    source(
        _DATA,
        "Above the limit the fifth of the files with the oldest times of change is removed.",
        "The same, for the ranks of the agent's node. A rank keeps four files, as in TaskD.",
        _AGES,
    ),
    source(
        _DATA,
        "Only files with numbers as names, in the folders of ranks, are removed.",
        "The same. Links are not followed.",
        _OURS,
        _AGES,
    ),
    source(
        _DATA,
        "Other files stay, and count for the size.",
        "They stay, and do not count: the limit is for the records.",
        _AGES,
    ),
    source(
        _DATA,
        "A file has a time as its name, and a line for each record. New records go to the newest "
        "file.",
        "The same.",
        _NEWEST,
        _LINES,
    ),
    source(
        _DATA,
        "Above 10 MB a new file follows.",
        "10 MiB, or `REKINDLE_PROFILING_FILE_MB`.",
        _TEN,
        _LARGE,
    ),
    none(
        _DATA,
        "On NFS a new file may begin earlier.",
        "Rekindle counts what it has written and calls `fsync`, so a file begins at the limit.",
    ),
)

DOCUMENT = Document("001", "TaskD: profiling of slow nodes", ROWS)
