"""Run a job: each engine places the attempts of a job and reports on them.

This package may import protocol, job, checkpoints, recovery and profiling. It starts coordinators
and agents as processes, so it may not import their packages. It may not import Prefect, flows,
tasks or blocks either. Only the Kubernetes engine may import the kubernetes client.
"""
