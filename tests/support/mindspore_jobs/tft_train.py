"""The same training in MindSpore's retry loop: TrainFaultTolerance with Rekindle's MindIO names.

Argument: a folder. The script replaces the parts for Ascend by parts for CPU: a gate before each
step instead of a device that stops, and a copy over TCP instead of Send and Receive. It runs in
MindSpore's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import Callback, Model, TrainFaultTolerance
from mindspore.train.callback import _train_fault_tolerance as native

from mindspore_jobs.train import EPOCHS, PER_EPOCH, Net, Watch, add_watched, dataset, digest
from rekindle.training import mindio
from rekindle.training.mindspore.mindspore_generations import receive_state, send_state
from rekindle.training.mindspore.state import Parameters


class FaultTolerance(TrainFaultTolerance):
    """MindSpore's callback, without its parts for Ascend."""

    def __init__(self, tft: Any, data: ds.Dataset, folder: Path) -> None:
        Callback.__init__(self)  # its own __init__ refuses all devices except Ascend
        self.tft, self._data = tft, data
        self.envs = os.environ["MS_ENABLE_TFT"]
        self.save_cb, self.ckpt_save_path = None, str(folder)
        self.cb_params = self.global_step = None
        self.initial_step = self.device_id = self.cur_step_num = self.cur_epoch_num = 0
        self.has_init_replica = self.is_uce_rank = False
        self.calls: list[Any] = []
        tft.tft_register_save_ckpt_handler(native._save_checkpoint_on_failure, self)
        tft.tft_register_rename_handler(native._rename_save_result, self)
        tft.tft_register_stop_handler(stop, self)
        tft.tft_register_clean_handler(clean, self)
        tft.tft_register_repair_handler(repair, self)
        tft.tft_register_rollback_handler(rollback, self)

    def on_train_begin(self, run_context: Any) -> None:
        self.cb_params = run_context.original_args()
        self.tft.tft_set_step_args(self.cb_params)
        # MindSpore counts steps within the epoch.
        self.cb_params.cur_step_num = self.tft.tft_get_repair_step()

    def on_train_step_begin(self, run_context: Any) -> None:
        try:
            mindio.begin_step()
        except RuntimeError as error:
            if "UCEError" in str(error):
                Parameters(self.cb_params.train_network).spoil()
            raise
        self.tft.tft_start_updating_os()

    def on_train_step_end(self, run_context: Any) -> None:
        if not self.has_init_replica:
            self.has_init_replica = True
            self._set_tft_optimizer_replica(run_context)
        self.cur_step_num = self.cb_params.cur_step_num
        self.cur_epoch_num = self.cb_params.cur_epoch_num
        self.global_step = self.cb_params.optimizer.global_step.clone()
        self.tft.tft_end_updating_os(self.cur_step_num + self.initial_step)

    def end(self, run_context: Any) -> None:
        self.tft.tft_destroy_processor()

    def _is_params_consistent(self) -> bool:
        return True  # the optimizer wrapper for Ascend sets the flag that decides this

    def _reset_acc_grads(self) -> None:
        """Set the dataset to the global step, between the repair and the next attempt.

        MindSpore has set it to the step within the epoch. With shuffled data, that is the order of
        another epoch.
        """
        self._data.set_init_step(self.tft.tft_get_repair_step())


def stop(args: Any, ctx: FaultTolerance) -> None:
    main = threading.current_thread() is threading.main_thread()
    ctx.calls.append(["stop", main, args is ctx.cb_params])


def clean(is_uce_error: bool, args: Any, ctx: FaultTolerance) -> int:
    ctx.calls.append(["clean", is_uce_error, ctx.tft.tft_get_repair_type()])
    return 0


def repair(
    step: int,
    need_rebuild: bool,
    error_ranks: list[int],
    repair_info: dict[str, Any],
    args: Any,
    ctx: FaultTolerance,
) -> None:
    ctx.calls.append(["repair", step, need_rebuild, error_ranks, repair_info])
    parameters = Parameters(args.train_network)
    for source, target in zip(repair_info["src"], repair_info["dst"], strict=True):
        with mindio.connection(source, target) as connection:
            if repair_info["repair_type"] == ctx.tft.RepairType.RT_SEND.value:
                send_state(parameters.arrays(), connection)
            else:
                receive_state(parameters, connection)


def rollback(step: int, args: Any, ctx: FaultTolerance) -> None:
    ctx.calls.append(["rollback", step])


class Leaving(Watch):
    """Write the result of the rank after the last step, before the rank pauses there."""

    leave: Callable[[], None]

    def wait(self, name: str) -> None:
        if name == f"rest-{EPOCHS * PER_EPOCH}":
            self.leave()
        super().wait(name)


def main() -> None:
    """Train, with the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    add_watched(parser)
    options = parser.parse_args()
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    ds.config.set_seed(5)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    rank, world = get_rank(), get_group_size()
    assert mindio.install()
    from mindio_ttp import framework_ttp as tft

    if rank == 0:
        tft.tft_init_controller(rank, world, False, enable_arf=False)
        tft.tft_start_controller("127.0.0.1", 8000, False, "")
    tft.tft_init_processor(rank, world, False, False, "", enable_arf=False)
    tft.tft_start_processor("127.0.0.1", 8000)
    net = Net()
    rate = nn.cosine_decay_lr(0.01, 0.1, EPOCHS * PER_EPOCH, PER_EPOCH, EPOCHS)
    optimizer = nn.Momentum(net.trainable_params(), rate, 0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = Model(net, loss, optimizer)
    watch = Leaving(options, rank)
    data = dataset(rank, world)
    tolerance = FaultTolerance(tft, data, options.folder)

    def leave() -> None:
        result = {"pid": os.getpid(), "digest": digest(model), "seen": watch.seen}
        result["calls"] = tolerance.calls
        (options.folder / f"result-{rank}-{os.getpid()}.json").write_text(json.dumps(result))

    watch.leave = leave
    model.train(EPOCHS, data, callbacks=[tolerance, watch], dataset_sink_mode=False)


if __name__ == "__main__":
    main()
