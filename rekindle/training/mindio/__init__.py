"""MindIO's names (`mindio_ttp`) upon Rekindle's own coordinator, where there is no MindIO.

MindSpore's `TrainFaultTolerance` and the adaptors of Megatron and MindSpeed call these names, and
register handlers that stop a device, clean it and repair its state. Here the job's coordinator
decides instead of MindIO's controller, and the ranks meet as those of a Session do. Where MindIO
itself can be imported, nothing of this is used. It loads no framework.

from rekindle.training import mindio
mindio.install()  # before anything imports mindio_ttp
"""

from rekindle.training.mindio.install import begin_step, install, line

__all__ = ["begin_step", "install", "line"]
