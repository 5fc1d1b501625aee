"""Run a job: each engine places the attempts of a job and reports on them.

This package may import the runtime, whose processes it starts, and all packages below it. It may
not import Prefect, flows, tasks or blocks. Only the Kubernetes engine may import the kubernetes
client.
"""
