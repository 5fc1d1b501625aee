"""Where a job runs: each engine places an attempt of a job and tells what became of it.

May import the runtime, whose processes it starts, and all below it; may not import Prefect, flows,
tasks or blocks. Only the Kubernetes engine may import the kubernetes client.
"""
