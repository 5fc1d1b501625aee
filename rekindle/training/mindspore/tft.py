"""MindSpore's fault tolerance (TFT) for scripts of any version, without MindIO.

With MINDIO_FOR_MINDSPORE=1 a script can import `mindio_ttp` (`training/mindio`) and
`train.TFTRegister`, which MindSpore 2.10 does not have. `nn.OptTFTWrapper` is MindSpore's own, but
it reads `cache_enable`, which optimizers of 2.10 do not have. All of it works on NPUs only. It was
never run on one.
"""

from __future__ import annotations

import os
from typing import Any

from mindspore import nn, train
from mindspore.train import TrainFaultTolerance
from mindspore.train.callback import _train_fault_tolerance as native

from rekindle.errors import SessionError
from rekindle.training import mindio
from rekindle.training.mindspore.faults import LOOK_S, UPDATE_S
from rekindle.waiting import until

_NAME = "TFTRegister"
_CACHE = "cache_enable"


class TFTRegister(TrainFaultTolerance):  # type: ignore[misc]  # MindSpore is absent here
    """The callback of MindSpore up to 2.6, on its successor.

    ctrl_rank_id, ctrl_ip, ctrl_port: of MindIO's controller. ckpt_save_path: the folder of the
    checkpoint that is saved when training must end.

    After a repair MindSpore 2.10 counts steps and batches from the start of the epoch, if the data
    does not sink. Then shuffled data would come in another order. This class corrects both.
    """

    def __init__(
        self, ctrl_rank_id: int, ctrl_ip: str, ctrl_port: int, ckpt_save_path: str
    ) -> None:
        world = int(os.environ.get("MS_WORKER_NUM", "1"))
        if not 0 <= ctrl_rank_id < world:
            raise SessionError(
                f"TFTRegister({ctrl_rank_id}, ...): a world of {world} ranks does not have it"
            )
        os.environ.update(MS_TFT_IP=ctrl_ip, MS_TFT_PORT=str(ctrl_port))
        super().__init__(ckpt_save_path)
        self.tft.tft_register_stop_handler(_stop, self)

    def on_train_begin(self, run_context: Any) -> None:
        """Count from the first step of the run."""
        super().on_train_begin(run_context)
        params, repaired = run_context.original_args(), self.tft.tft_get_repair_step()
        if repaired and not params.dataset_sink_mode:
            params.cur_step_num = repaired

    def _reset_acc_grads(self) -> None:
        """Reset sums of gradients, and set the dataset to the step of the run."""
        super()._reset_acc_grads()
        if not self.cb_params.dataset_sink_mode:
            self.cb_params.train_dataset.set_init_step(self.tft.tft_get_repair_step())


def _stop(args: Any, callback: TFTRegister) -> None:
    """Stop the device once a running update has ended.

    MindSpore reports the start of an update only to MindIO's library, which may be absent.
    """
    if not callback.is_uce_rank:
        until(callback._is_params_consistent, UPDATE_S, LOOK_S)
    native._tft_stop_callback(args, callback)


def install() -> None:
    """Supply the names that are absent."""
    mindio.install()
    for module in (train, train.callback):
        if not hasattr(module, _NAME):
            setattr(module, _NAME, TFTRegister)
    if not hasattr(nn.Optimizer, _CACHE):
        setattr(nn.Optimizer, _CACHE, False)
