"""Run the script of document 003 on CPU. Only tests use this.

Arguments: a folder, `--script` with the script (also the document's own file), and `--error
RANK:STEP`. Each rank writes `result-<rank>-<pid>.json` there. SUBSTITUTIONS in `__init__.py` lists
all differences from an NPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import mindspore.utils.utils as handle
from mindspore import nn
from mindspore.nn.optim import tft_wrapper
from mindspore.train import Callback, Model
from mindspore.train import model as loop
from mindspore.train.callback import _train_fault_tolerance as native

from rekindle.training import mindio
from rekindle.training.mindio import framework
from rekindle.training.mindspore import tft
from rekindle.training.mindspore.mindspore_generations import receive_state, send_state
from rekindle.training.mindspore.state import Parameters

UCE = "UCEError error occurs when execute, error_code=507053"


class Report(nn.Cell):
    """Stands for TensorReport: it returns its input."""

    def add_prim_attr(self, name: str, value: object) -> Report:
        return self

    def construct(self, name: str, value: ms.Tensor) -> ms.Tensor:
        return value


class Recorder(Callback):
    """Record the loss of each step, and raise the error behind the train network."""

    def __init__(self, options: argparse.Namespace, model: Model) -> None:
        super().__init__()
        self._folder, self._model = options.folder, model
        self._errors = [tuple(map(int, each.split(":"))) for each in options.error]
        self._rank = int(os.environ["RANK_ID"])
        self.losses: dict[int, float] = {}

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        step = params.cur_step_num - 1
        self.losses[step] = float(params.net_outputs.asnumpy())
        if (self._rank, step) in self._errors:
            self._errors.remove((self._rank, step))
            Parameters(self._model.train_network).spoil()
            raise RuntimeError(UCE)

    def write(self) -> None:
        """Write the result of the rank."""
        total = hashlib.md5()
        for parameter in self._model.train_network.get_parameters():
            total.update(parameter.asnumpy().tobytes())
        result = {"pid": os.getpid(), "losses": self.losses, "digest": total.hexdigest()}
        (self._folder / f"result-{self._rank}-{os.getpid()}.json").write_text(json.dumps(result))


def install(options: argparse.Namespace) -> None:
    """Make all substitutions."""
    set_device, train, get_context = ms.set_device, Model.train, ms.get_context
    ms.set_device = lambda device_target, *more: set_device("CPU", *more)
    parallel = ms.set_auto_parallel_context
    ms.set_auto_parallel_context = lambda parallel_mode: parallel(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True
    )
    ms.set_seed(1)
    ds.config.set_seed(1)
    ascend = SimpleNamespace(
        get_context=lambda name: "Ascend" if name == "device_target" else get_context(name),
        get_auto_parallel_context=ms.get_auto_parallel_context,
    )
    floats = SimpleNamespace(int32=ms.float32)
    for module in (tft_wrapper, native):
        module.context, module.mstype, module.TensorReport = ascend, floats, Report
    handle.context = ascend
    begin = native.TrainFaultTolerance.on_train_step_begin

    def begin_step(self: Any, run_context: Any) -> None:
        begin(self, run_context)
        mindio.begin_step()
        self.tft.tft_start_updating_os()

    tft.TFTRegister.on_train_step_begin = begin_step
    native._stop_device = native._get_uce_mem_info = native._repair_device = lambda number: None
    native._get_uce_process_strategy = lambda: "RS_UCE_HIGHLEVEL"
    native.clean_tdt_channel = leave_gate
    resumed = SimpleNamespace(resume_hccl_comm=lambda: None)
    native.CollectiveManager = SimpleNamespace(get_instance=lambda: resumed)
    native.send_recv, native.reset_params = send_recv, reset_params
    native.direct_copy_to_host = lambda parameter: parameter.asnumpy()[0]
    native._reset_opt_event_info = lambda: None

    def train_recorded(self: Model, epoch: int, data: ds.Dataset, callbacks: Any) -> None:
        recorder = Recorder(options, self)
        loop._reset_error_state = self.train_network.compile_cache.clear
        train(self, epoch, data, callbacks=[recorder, *callbacks])
        recorder.write()

    Model.train = train_recorded


def leave_gate() -> None:
    """Wake the other ranks, which wait for this rank before the next step."""
    framework.current().generations.gate.sever()


def send_recv(parameters: list[ms.Parameter], source: int, target: int) -> int:
    """Copy parameters from one rank to another over TCP."""
    holder = Parameters(_Holder(parameters))
    with mindio.connection(source, target) as connection:
        if int(os.environ["RANK_ID"]) == source:
            send_state(holder.arrays(), connection)
        else:
            receive_state(holder, connection)
    return 0


def reset_params(parameters: list[ms.Parameter]) -> int:
    """Set parameters to 0."""
    for each in parameters:
        each.copy_(ms.Tensor(each.asnumpy() * 0))
    return 0


class _Holder(nn.Cell):
    """A network of given parameters."""

    def __init__(self, parameters: list[ms.Parameter]) -> None:
        super().__init__()
        self.held = ms.ParameterTuple(parameters)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--script", default=str(Path(__file__).with_name("uce_case.py")))
    parser.add_argument("--error", action="append", default=[], help="RANK:STEP, once")
    options = parser.parse_args()
    install(options)
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
