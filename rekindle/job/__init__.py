"""A job's description, its directory and its journal file.

May import only recovery, checkpoints and profiling."""
