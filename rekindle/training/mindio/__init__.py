"""Provide MindIO's names (`mindio_ttp`) with Rekindle's coordinator, where MindIO is missing.

MindSpore's `TrainFaultTolerance` and the adaptors of Megatron and MindSpeed call these names. They
register handlers that stop a device, clean it and repair its state. Here the job's coordinator
decides instead of MindIO's controller, and the ranks meet in the same way as a Session's ranks. If
Python can import MindIO itself, `install` leaves MindIO in use. The package loads no framework.

from rekindle.training import mindio
mindio.install()  # before another module imports mindio_ttp
"""

from rekindle.training.mindio.install import begin_step, connection, install

__all__ = ["begin_step", "connection", "install"]
