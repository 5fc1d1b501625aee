"""The MindSpore names that the project calls, checked against the installed MindSpore."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mindspore_jobs.job import PYTHON, ROOT, needs_mindspore
from repository import SUPPORT

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]

READ_FROM = "2.10.0"
NAMES = SUPPORT / "mindspore_jobs" / "names.py"
CHECKED = [
    *sorted((ROOT / "rekindle" / "training" / "mindspore").glob("*.py")),
    ROOT / "rekindle" / "training" / "msrun.py",
    ROOT / "rekindle" / "agent" / "fork_server_process.py",
    ROOT / "rekindle" / "training" / "node_check" / "mindspore_device.py",
    SUPPORT / "mindspore_jobs" / "tft_train.py",
]

Call = tuple[int, tuple[str, ...]]  # positional arguments with self; names of keyword arguments
_CALLBACK = "mindspore.train.callback._train_fault_tolerance"

# As rekindle/training and rekindle/agent call them.
CALLS: dict[str, Call] = {
    "mindspore.Tensor": (2, ()),
    "mindspore.Tensor.asnumpy": (1, ()),
    "mindspore.Tensor.copy_": (2, ()),
    "mindspore.Tensor.size.fget": (1, ()),
    "mindspore.Parameter": (1, ("name", "requires_grad")),
    "mindspore.Parameter.copy_": (2, ()),
    "mindspore.Parameter.asnumpy": (1, ()),
    "mindspore.Parameter.name.fget": (1, ()),
    "mindspore.communication.init": (0, ()),
    "mindspore.device_context.ascend.is_available": (0, ()),
    "mindspore.dataset.Dataset.get_dataset_size": (1, ()),
    "mindspore.dataset.Dataset.set_init_step": (2, ()),
    "mindspore.nn.Cell": (0, ()),
    "mindspore.nn.Cell.init_parameters_data": (1, ()),
    "mindspore.nn.Cell.get_parameters": (1, ()),
    "mindspore.nn.Cell.cells_and_names": (1, ()),
    "mindspore.get_context": (1, ()),
    "mindspore.nn.Optimizer.construct": (2, ()),
    "mindspore.nn.Momentum.construct": (2, ()),
    "mindspore.nn.Momentum": (3, ()),
    "mindspore.ops.AllReduce": (0, ()),
    "mindspore.ops.Depend": (0, ()),
    "mindspore.ops.matmul": (2, ()),
    "mindspore.set_device": (2, ()),
    "mindspore.train.Callback": (0, ()),
    "mindspore.train.Callback.on_train_begin": (2, ()),
    "mindspore.train.Callback.on_train_epoch_begin": (2, ()),
    "mindspore.train.Callback.on_train_step_begin": (2, ()),
    "mindspore.train.Callback.on_train_step_end": (2, ()),
    "mindspore.train.Callback.on_train_epoch_end": (2, ()),
    "mindspore.train.EarlyStopping": (0, ()),
    "mindspore.train.ReduceLROnPlateau": (0, ()),
    "mindspore.train.RunContext.get_stop_requested": (1, ()),
    "mindspore.train.RunContext.original_args": (1, ()),
    "mindspore.train.Model": (3, ()),
    "mindspore.train.Model.train": (
        3,
        ("callbacks", "dataset_sink_mode", "sink_size", "initial_epoch"),
    ),
    "mindspore.get_auto_parallel_context": (1, ()),
    "mindspore.parallel.auto_parallel.AutoParallel": (1, ()),
    "mindspore.dataset.engine.datasets._reset_training_dataset": (2, ()),
    "mindspore.train.Model.train_network.fget": (1, ()),
}

# As rekindle/training/mindspore/faults.py and state.py call them for an NPU; in C++.
ON_NPU: dict[str, Call] = {
    "mindspore._c_expression._get_optimzer_timestamps": (0, ()),
    "mindspore._c_expression._repair_device": (1, ()),
    "mindspore._c_expression._reset_error_state": (0, ()),
    "mindspore._c_expression.direct_copy_to_host": (1, ()),
}

# As rekindle/training/mindspore/tft.py extends MindSpore's callback.
EXTENDED: dict[str, Call] = {
    "mindspore.train.TrainFaultTolerance": (1, ()),
    "mindspore.train.TrainFaultTolerance.on_train_begin": (2, ()),
}

# Modules and classes that the code only names.
NAMED = {
    "mindspore.train",
    "mindspore.train.callback",
    _CALLBACK,
    "mindspore.nn.Optimizer",
    "mindspore.dataset.Dataset",
}

# Implemented in C++, without a signature.
OF_CPP = {
    *ON_NPU,
    "mindspore.Tensor",
    "mindspore.Tensor.copy_",
    "mindspore.Parameter.copy_",
    "mindspore.Parameter.asnumpy",
}

# As rekindle/training/mindio calls MindSpore's own handlers: arguments and context.
HANDLERS: dict[str, Call] = {
    f"{_CALLBACK}._save_checkpoint_on_failure": (4, ()),
    f"{_CALLBACK}._rename_save_result": (2, ()),
    f"{_CALLBACK}._tft_exit_cb": (1, ()),
    f"{_CALLBACK}._tft_stop_callback": (2, ()),
    f"{_CALLBACK}._tft_clean_callback": (3, ()),
    f"{_CALLBACK}._tft_repair_callback": (6, ()),
    f"{_CALLBACK}._tft_rebuild_groups": (3, ()),
    "mindspore.runtime.synchronize": (0, ()),
}

# Names that mindspore_jobs/tft_train.py uses instead of MindSpore's callback on CPU.
STOOD_IN: dict[str, Call] = {
    "mindspore.train.TrainFaultTolerance._set_tft_optimizer_replica": (2, ()),
    "mindspore.train.TrainFaultTolerance._is_params_consistent": (1, ()),
    "mindspore.train.TrainFaultTolerance._reset_acc_grads": (1, ()),
    "mindspore.train.TrainFaultTolerance.end": (2, ()),
    "mindspore.train.model._handle_tft": (1, ()),
    "mindspore.train.model._handle_exception_info": (4, ()),
    "mindspore.train.model._calc_cb_initial_step": (2, ()),
    "mindspore.utils.utils.TftHandle.init": (1, ("config",)),
}

# As rekindle/training/msrun.py replaces the callbacks for msrun's workers, and as it calls msrun
# (tests/integration/mindspore/test_msrun.py).
_MANAGER = "mindspore.parallel.cluster.process_entity._api._ProcessManager"
MSRUN: dict[str, Call] = {
    "mindspore.parallel.cluster.run.get_args": (0, ()),
    "mindspore.parallel.cluster.run.run": (1, ()),
    f"{_MANAGER}.start_all_workers": (1, ()),
    f"{_MANAGER}.monitor_rank_status": (2, ()),
    f"{_MANAGER}.kill_workers": (2, ()),
}


def test_each_call_fits_the_released_signature() -> None:
    """Each call has the positional and keyword arguments of the released version."""
    calls = json.dumps(CALLS | ON_NPU | EXTENDED | HANDLERS | STOOD_IN | MSRUN)
    result = subprocess.run(
        [PYTHON, NAMES], input=calls, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout.splitlines()[-1])
    assert content["version"] == READ_FROM
    assert content["wrong"] == {}
    assert set(content["without"]) == OF_CPP  # the tests of jobs and of the node check call them


def test_no_name_is_used_that_is_not_checked() -> None:
    """The tables contain each MindSpore name in the modules, except constants."""
    checked = {*CALLS, *ON_NPU, *EXTENDED, *HANDLERS, *STOOD_IN, *MSRUN}
    constants = {f"mindspore.{name}" for name in ("float32", "int32", "GRAPH_MODE", "__version__")}
    used = {name for path in CHECKED[:-1] for name in names_in(path)}
    assert len(used) > 10
    assert used <= checked | constants | NAMED
    assert f"{_CALLBACK}._save_checkpoint_on_failure" in set(names_in(CHECKED[-1]))


def names_in(path: Path) -> Iterator[str]:
    """Return the full MindSpore names that a module uses."""
    tree = ast.parse(path.read_text())
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {a.asname or a.name: a.name for a in node.names if a.name == "mindspore"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mindspore."):
            bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "mindspore":
            bound |= {a.asname or a.name: f"mindspore.{a.name}" for a in node.names}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if id(node) not in inner and isinstance(node, ast.Attribute | ast.Name):
            root, _, rest = ast.unparse(node).partition(".")
            if root in bound:
                yield f"{bound[root]}.{rest}".rstrip(".")
