"""A job's description, its directory and its journal file.

May import recovery, checkpoints and profiling alone."""
