"""The script of document 003, and the hook with which it trains on CPU."""

from __future__ import annotations

# What the script finds different from an NPU, and what it gets.
SUBSTITUTIONS = {
    "ms.set_device": "the device is CPU",
    "context.get_context('device_target')": "the handlers of MindSpore see Ascend",
    "SEMI_AUTO_PARALLEL": "DATA_PARALLEL; MindSpore refuses SEMI_AUTO_PARALLEL on CPU",
    "int32 flags": "float32, because AllReduce on CPU has no other type",
    "TensorReport": "the start of an update is reported when the step begins",
    "the seeds": "the script sets none; all ranks and runs get the same",
    "_stop_device": "no rank enters a step in which another one is missing (mindio.begin_step)",
    "clean_tdt_channel": "the end of the wait of other ranks before their next step",
    "resume_hccl_comm, _get_uce_mem_info, _repair_device": "nothing",
    "_get_uce_process_strategy": "RS_UCE_HIGHLEVEL: the memory of parameters is damaged",
    "send_recv": "a copy over TCP",
    "reset_params, direct_copy_to_host, _reset_opt_event_info": "the same on the host",
    "_reset_error_state": "the graph is compiled again",
    "the error": "raised behind the train network; then the rank's parameters are overwritten",
    "DATA_PATH": "generated pictures in the files of MNIST (pictures.py)",
    "train.TFTRegister, mindio_ttp": "Rekindle's own, as for each script",
}
