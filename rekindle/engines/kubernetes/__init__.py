"""Run jobs in pods: from a job's description to the manifests of every kind of workload.

The modules that render manifests are pure: they do no I/O and do not import the kubernetes client;
an import contract checks that. No module here imports Prefect or blocks.
"""
