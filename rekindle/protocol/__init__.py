"""Interfaces between processes: messages, HTTP views, heartbeat page, snapshot buffer.

Each side of an interface imports this package. So code of one side alone does not belong here. The
package may import only job, checkpoints, recovery and profiling. A record that a message carries is
in the folder whose functions compute or judge it. From recovery and profiling this package imports
only such records.
"""
