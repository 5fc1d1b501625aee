"""Interfaces between processes: messages, HTTP views, heartbeat page, snapshot buffer.

Each side of an interface imports this package. So code of one side alone does not belong here. The
package may import only job, checkpoints, recovery and profiling.
"""
