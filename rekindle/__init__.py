"""Rekindle: a training run is a Prefect flow, and a fault ends neither the run nor its progress.

Nothing is imported here: each rank of a job imports this package, and so does every command line.
"""

__version__ = "0.1.0"
