"""The facts by which a rank in a step knows that its state is from before the step."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from mindspore_jobs.job import PYTHON, ROOT, needs_mindspore
from repository import SUPPORT

pytestmark = [needs_mindspore, pytest.mark.timeout(200)]

SHARDED = (
    "the parallel mode is {}, so each rank has only a part of the state; a Session needs "
    "ParallelMode.DATA_PARALLEL; other modes work with TFTRegister or TrainFaultTolerance, without "
    "a Session"
)


def test_parameters_and_updates() -> None:
    """Rekindle counts each update, in any place of the optimizer.

    It copies the parameters that a forward pass changes. It does not copy frozen weights, but
    detects their changes. Callbacks get the saved state of others of their class. Modes with a part
    of the state on each rank are refused, and sinks on CPU, which MindSpore would leave out. On CPU
    a rank leaves a broken step only if all optimizers have begun their updates in it. Without this
    the newest update may be that of the last step.
    """
    script = SUPPORT / "mindspore_jobs" / "parameters.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    done = subprocess.run(
        [PYTHON, script], capture_output=True, text=True, check=True, env=environment
    )
    content = json.loads(done.stdout.splitlines()[-1])
    frozen = "step.network._backbone.frozen"
    statistics = [
        f"step.network._backbone.norm.{name}" for name in ("moving_mean", "moving_variance")
    ]
    assert content == {
        "class": "Clipped",
        "begun": [[0], [1], [2], [3]],
        "changing": statistics,
        "as_before": True,
        "frozen_changed": False,
        "found": [[frozen, *statistics], True],
        "uncounted": [None, []],
        "kept": [4, 2, [7, 8, 0], 3, True],
        "refused": [
            SHARDED.format("semi_auto_parallel"),
            SHARDED.format("data_parallel with enable_parallel_optimizer"),
            "dataset_sink_mode=True is not possible: MindSpore sinks data only on NPUs in graph "
            "mode, and this is CPU; leave it out",
        ],
        "broken": [
            *([True, 3], [True, 2], [True, 2], [True, 2]),
            *([True, 3], [False, None], [False, None], [False, None]),
        ],
        "odd": "parameter odd has type complex128, which a state cannot contain",
    }
