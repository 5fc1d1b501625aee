"""MindSpore: recovery from UCE, its script and its shell lines."""

from __future__ import annotations

from document_003 import SUBSTITUTIONS

from specification.row import Document, none, run, source

_HERE = "integration/specification/test_003.py"
_STARTS = f"{_HERE}::test_the_script_trains_as_the_shell_lines_start_it"
_CONTINUES = f"{_HERE}::test_training_continues_at_the_step_behind_the_error"
_REPLICA = f"{_HERE}::test_the_state_comes_from_a_replica"
_LOSSES = f"{_HERE}::test_the_losses_of_each_rank_are_those_of_an_undisturbed_run"
_ERRORS = "integration/mindspore/test_device_errors.py::test_an_error_costs_no_process_and_no_step"
_NPU = "integration/mindspore/test_npu_adapter.py::test_each_rank_stops_and_cleans_its_device"
_MINDIO = "integration/mindspore/test_mindio.py"
_LAST_WORDS = f"{_MINDIO}::test_a_lost_rank_has_the_others_save_their_state"
_HANDLERS = f"{_MINDIO}::test_handlers_are_called_as_in_mindspore"
_ALONE = f"{_HERE}::test_last_words_alone"
_COMMAS = "unit/job/test_ascend.py::test_a_switch_gets_its_missing_commas"
_ABOUT = "Overview"
_LIMITS = "Restrictions"
_CASE = "Example"
_PREPARE = "Environment"
_DATA = "Data"
_MODEL = "Model"
_CALLBACK = "Callback"
_START = "Variables and start"
_CHANGES = "; ".join(f"{name}: {what}" for name, what in SUBSTITUTIONS.items())

ROWS = (
    run(
        _ABOUT,
        "A UCE can interrupt parallel training. The model recovers where the fault happened, and "
        "training continues without a restart.",
        "With MindIO's names and with a `Session` all processes continue. On CPU a `Session` "
        "restarts all ranks if a collective may be open.",
        _CONTINUES,
        _ERRORS,
    ),
    none(
        _LIMITS,
        "Only graph mode is supported.",
        "The same. With a `Session` in PyNative mode all ranks restart; no test shows that.",
    ),
    none(
        _LIMITS,
        "The network must have no global state that influences the results of training.",
        "The same: all state must be in parameters, or in callbacks with `state_dict()`.",
    ),
    run(
        _CASE,
        "The example is data parallel training on 4 cards.",
        "4 ranks on CPU.",
        _STARTS,
    ),
    run(
        _CASE,
        "In a UCE, MindSpore and MindIO stop the training of all cards.",
        "The job's coordinator takes the part of MindIO's controller. On CPU no rank begins "
        "another step; on an NPU each rank stops its device (never run).",
        _CONTINUES,
        _HANDLERS,
    ),
    source(
        _CASE,
        "The card with the fault is cleaned and repaired.",
        "MindSpore's own functions do that. A test records their calls; no NPU was available.",
        _NPU,
    ),
    run(
        _CASE,
        "The parameters are copied from the backup card to the card with the fault.",
        "The rank gets the state of a rank that holds the same.",
        _REPLICA,
        _LOSSES,
    ),
    run(
        _CASE,
        "After a fault in step n training continues with step n+1.",
        "The same. The losses of all ranks equal those of an undisturbed run.",
        _CONTINUES,
        _LOSSES,
    ),
    run(
        _PREPARE,
        "MindIO must be installed.",
        "Where it is absent, Rekindle supplies `mindio_ttp`. MindIO itself is never hidden.",
        _STARTS,
        "unit/training/mindio/test_names.py::test_mindio_itself_wins",
    ),
    none(
        _DATA,
        "MNIST is downloaded with `wget` and unpacked with `unzip`.",
        "The user does that. Tests generate pictures in the files of MNIST.",
    ),
    source(
        _MODEL,
        "A TFT optimizer reports to MindIO before each update. `nn.OptTFTWrapper` makes it.",
        "MindSpore 2.10's wrapper reads `cache_enable`, which its optimizers do not have; Rekindle "
        "supplies it. MindSpore reports an update only to MindIO's library. Without it the device "
        "is stopped once the wrapper's flag is 1 again. The test replaces the report.",
        _STARTS,
    ),
    run(
        _MODEL,
        "`ms.set_context(mode=ms.GRAPH_MODE, jit_level='O1')`.",
        "The test's script has this call.",
        _STARTS,
    ),
    source(
        _MODEL,
        '`ms.set_device(device_target="Ascend")`.',
        f"The test maps Ascend to CPU. All substitutions: {_CHANGES}.",
        _STARTS,
    ),
    none(
        _MODEL,
        "`ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL)`.",
        'MindSpore 2.10 refuses this mode on CPU ("currently only support Ascend/GPU backend"), so '
        "the test uses DATA_PARALLEL. Rekindle's names serve each replica group that MindSpore "
        "reports.",
    ),
    run(
        _MODEL,
        "`init()` forms the group of all ranks.",
        "The same, through the scheduler that Rekindle starts.",
        _STARTS,
    ),
    run(
        _MODEL,
        "The network has a `MatMul` with a `Parameter` of `HeUniform(math.sqrt(5))`, `ops.Print`, "
        "`nn.Flatten`, `nn.ReLU` and two `nn.Dense`.",
        "The test's script has them.",
        _STARTS,
    ),
    run(
        _MODEL,
        "`DATA_PATH` names the folder of the data.",
        "Ranks get the variables of the command.",
        _STARTS,
    ),
    run(
        _MODEL,
        "`ds.MnistDataset` with `Rescale`, `Normalize`, `HWC2CHW`, `TypeCast` and batches of 32.",
        "The test's script has them. After a repair the order of the shuffled data is that of an "
        "undisturbed run; MindSpore 2.10 alone would take another.",
        _STARTS,
        _LOSSES,
    ),
    run(
        _MODEL,
        "`nn.SGD(net.trainable_params(), 1e-2)`, `nn.CrossEntropyLoss()` and `ms.Model` with the "
        "wrapped optimizer.",
        "The test's script has them.",
        _STARTS,
    ),
    run(
        _CALLBACK,
        "A `train.TFTRegister` must be among the callbacks.",
        "MindSpore 2.10 does not have the class; Rekindle supplies it.",
        _STARTS,
        _CONTINUES,
    ),
    run(
        _CALLBACK,
        'Its arguments are the rank, address and port of the controller: `0, "127.0.0.1", 30051`.',
        "They are taken. The job's coordinator decides, so nothing listens at this port.",
        _STARTS,
    ),
    run(
        _CALLBACK,
        "Its last argument is the folder of checkpoints: `./ttp_checkpoints/`.",
        "MindSpore's own handler saves there when ranks must end.",
        _ALONE,
    ),
    run(
        _CALLBACK,
        "`train.TimeMonitor(data_size=1)` and `train.LossMonitor(1)`.",
        "The test reads the losses that the monitor prints.",
        _STARTS,
    ),
    run(
        _CALLBACK,
        "`model.train(5, dataset, callbacks=[...])`.",
        "The same.",
        _STARTS,
    ),
    run(
        _START,
        "`MS_ENABLE_TFT='{UCE:1, TTP:1}'` switches the recovery on. UCE:1 is the fast recovery.",
        "The same.",
        _CONTINUES,
    ),
    run(
        _START,
        "TTP:1 switches last words on.",
        "A rank that gets SIGTERM saves a checkpoint through MindSpore's handlers.",
        _LAST_WORDS,
        _ALONE,
    ),
    none(
        _START,
        "UCE:1 switches last words on by default.",
        "Last words are on whenever the script has a `TFTRegister` or `TrainFaultTolerance`. No "
        "test runs without TTP:1.",
    ),
    run(
        _START,
        "`MS_ENABLE_TFT='{UCE:0, TTP:1}'` switches last words alone on.",
        "The rank with the error ends. A healthy rank saves the newest state. Then all ranks "
        "restart, if the job has a restart left.",
        _ALONE,
    ),
    run(
        _START,
        "`MINDIO_FOR_MINDSPORE=1` enables MindIO's adapter for MindSpore.",
        "With it Rekindle supplies MindIO's names.",
        _STARTS,
    ),
    run(
        _START,
        "The shell line exports `MS_ENABLE_TFT='{UCE:1 TTP:1}'`, without a comma.",
        "MindSpore's C++ code then takes UCE for off. Rekindle adds the comma and says so.",
        _STARTS,
        _COMMAS,
    ),
    run(
        _START,
        "`export DATA_PATH=${EXEC_PATH}/MNIST_DATA/train/`.",
        "The same.",
        _STARTS,
    ),
    none(
        _START,
        "`msrun` starts the training.",
        "`rekindle run --framework mindspore` takes its place. A script that msrun starts has no "
        "connection to an agent, so nothing repairs its ranks. The test translates the line.",
    ),
    run(
        _START,
        "`--worker_num=4 --local_worker_num=4` give the number of ranks in total and on a machine.",
        "`--nnodes` and `--nproc-per-node`.",
        _STARTS,
    ),
    none(
        _START,
        "`--master_port=10970` is the port of the scheduler.",
        "Each start has a new scheduler at a free port, because a scheduler serves no second set "
        "of processes on CPU.",
    ),
    none(
        _START,
        "With `--join=False` msrun ends after the start.",
        "`rekindle run` waits for the end of the job.",
    ),
    run(
        _START,
        "`--log_dir=./uce_logs` is the folder of the logs.",
        "`--log-dir`. It has the logs of each rank and attempt.",
        _STARTS,
    ),
    run(
        _START,
        "The script `UCE_case.py` has the code above.",
        "The test's script has the same calls and names. The hook also takes the document's own "
        "file (`--script`).",
        _STARTS,
    ),
)

DOCUMENT = Document("003", "MindSpore: recovery from UCE", ROWS)
